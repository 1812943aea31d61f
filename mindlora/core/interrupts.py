"""Ctrl-C while MindSpore is in the process."""

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Callable, Iterator, Optional

_entered: Optional["Interrupts"] = None


class Interrupts:
    """Has Ctrl-C do what this program wants, while the context lasts.

    While MindSpore compiles and runs graphs, it puts its own handler of SIGINT in the place of Python's, and does not
    always put that back: the process then ends with SIGTERM, or, if a library is being imported, with a crash. So
    SIGINT is blocked in all threads, which no handler can change, and one thread waits for it. Enter in the main
    thread, before anything is imported that starts threads.

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
        """From now on, Ctrl-C calls ``receive``, in a thread of its own; None: it ends the process again."""
        self._receive = receive or self.leave

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within this, the first Ctrl-C raises KeyboardInterrupt in the main thread."""
        if self._used and self._before is None:
            # It stays until the end: a signal that comes a little late would end the process.
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
        # No library gets the chance to fail at its end, which MindSpore does while it is imported.
        os._exit(130)

    def _wait(self) -> None:
        while True:
            signal.sigwait({signal.SIGINT})
            if self._over:
                return
            if self._raising:
                # Wakes the main thread whatever it waits for.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            else:
                self._receive()

    def _raise(self, *_: object) -> None:
        if self._raising:
            self._raising = False
            raise KeyboardInterrupt


def entered() -> Optional[Interrupts]:
    """Returns the Interrupts that this process is within, or None."""
    return _entered
