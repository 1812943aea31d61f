"""Turns: one thread computes at a time, in the order of their requests."""

import collections
import contextlib
import threading
from typing import Deque, Iterator


class Turns:
    """Gives turns to threads, first come, first served.

    Two MindSpore graphs that run at once in one process wait for each other forever, and with a plain lock a thread
    that asks again immediately would always be first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: Deque[object] = collections.deque()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until all earlier threads have had their turns; later ones wait until the context ends."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket)
        try:
            yield
        finally:
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
