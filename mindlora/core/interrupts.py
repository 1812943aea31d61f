"""Handles Ctrl-C in processes that use MindSpore."""

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Callable, Iterator, Optional

_entered: Optional["Interrupts"] = None


class Interrupts:
    """A context that handles Ctrl-C in place of MindSpore.

    While MindSpore compiles and runs graphs, it replaces Python's handler of SIGINT with its own, and does not
    always restore it: the process then ends with SIGTERM, or, if a library is being imported, with a crash. So
    SIGINT is blocked in all threads, which no handler can change, and one thread waits for it. Enter the context in the
    main thread, before importing anything that starts threads.

    Ctrl-C calls ``clean_up`` and ends the process at once, with one line, which ``program`` begins, and exit code 130.
    After ``hand_to(receive)`` it calls ``receive`` instead, and within ``raising()`` it raises KeyboardInterrupt in the
    main thread. Where SIGINT is ignored, as in the background of a shell, it stays so.
    """

    def __init__(self, program: str = "mindlora", clean_up: Optional[Callable[[], Any]] = None):
        self._program = program
        self._clean_up = clean_up
        self._receive: Callable[[], Any] = self.leave
        self._raising, self._over = False, False
        self._before: Any = None
        self._thread = threading.Thread(target=self._wait, name="mindlora-interrupts", daemon=True)
        self._used = hasattr(signal, "sigwait") and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

    def __enter__(self) -> "Interrupts":
        global _entered
        if self._used:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._thread.start()
            _entered = self
        return self

    def __exit__(self, *_: object) -> None:
        global _entered
        if self._used:
            _entered, self._over = None, True
            signal.pthread_kill(self._thread.ident or 0, signal.SIGINT)
            self._thread.join()
            if self._before is not None:
                signal.signal(signal.SIGUSR1, self._before)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def hand_to(self, receive: Optional[Callable[[], Any]]) -> None:
        """Makes Ctrl-C call ``receive``, in a separate thread; with None, it ends the process again."""
        self._receive = receive or self.leave

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A context in which the first Ctrl-C raises KeyboardInterrupt in the main thread."""
        if self._used and self._before is None:
            # It stays until the end, since a slightly late signal would end the process.
            self._before = signal.signal(signal.SIGUSR1, self._raise)
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def leave(self) -> None:
        """Ends the process at once, from any thread."""
        with contextlib.suppress(Exception):
            print(f"\n{self._program}: interrupted", file=sys.stderr, flush=True)
            if self._clean_up:
                self._clean_up()
        # Libraries cannot fail at exit, as MindSpore does while it is being imported.
        os._exit(130)

    def _wait(self) -> None:
        while True:
            signal.sigwait({signal.SIGINT})
            if self._over:
                return
            if self._raising:
                # Wakes the main thread from any wait.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            else:
                self._receive()

    def _raise(self, *_: object) -> None:
        if self._raising:
            self._raising = False
            raise KeyboardInterrupt


def entered() -> Optional[Interrupts]:
    """Returns the Interrupts context of this process, or None."""
    return _entered
