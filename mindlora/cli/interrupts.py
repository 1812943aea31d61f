"""Ctrl-C while MindSpore is in the process."""

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Callable, Iterator, Optional

# Seconds after which the waiting thread looks whether it is still needed.
_PATIENCE = 0.2


class Interrupts:
    """Has Ctrl-C do what this program wants, while the context lasts.

    While MindSpore compiles and runs graphs, it puts its own handler of SIGINT in the place of Python's, and does not
    always put that back: the process then ends with SIGTERM, or, if a library is being imported, with a crash. So
    SIGINT is blocked in all threads, which no handler can change, and one thread waits for it. Enter before anything is
    imported that starts threads.

    Within ``raising()``, Ctrl-C raises KeyboardInterrupt in the main thread. Elsewhere it ends the process at once,
    with exit code 130, or, after ``ignore()``, does nothing.

    Args:
        clean_up (callable, optional): Called before the process is ended.
    """

    def __init__(self, clean_up: Optional[Callable[[], Any]] = None):
        self._clean_up = clean_up
        self._leaving, self._raising, self._over = True, False, False
        self._thread = threading.Thread(target=self._wait, name="mindlora-interrupts", daemon=True)
        # In the background of a shell it is ignored, and stays so.
        self._used = hasattr(signal, "sigtimedwait") and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

    def __enter__(self) -> "Interrupts":
        if self._used:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._before = signal.signal(signal.SIGUSR1, self._receive)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._used:
            self._over = True
            self._thread.join()
            signal.signal(signal.SIGUSR1, self._before)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def ignore(self) -> None:
        """From now on, Ctrl-C does nothing but within ``raising()``."""
        self._leaving = False

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within this, Ctrl-C raises KeyboardInterrupt in the main thread."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _wait(self) -> None:
        while not self._over:
            if signal.sigtimedwait({signal.SIGINT}, _PATIENCE) is None:
                continue
            if self._leaving and not self._raising:
                self._leave()
            # Wakes the main thread whatever it waits for.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _receive(self, *_: object) -> None:
        if self._raising:
            self._raising = False
            raise KeyboardInterrupt

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            print("\nmindlora: interrupted", file=sys.stderr, flush=True)
            if self._clean_up:
                self._clean_up()
        # No library gets the chance to fail at its end, which MindSpore does while it is imported.
        os._exit(130)
