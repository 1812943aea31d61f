"""Turns: one computes at a time, in the order in which they ask."""

import collections
import contextlib
import threading
from typing import Deque, Iterator


class Turns:
    """Gives threads turns, first come, first served.

    Two graphs of MindSpore that run at once in one process wait for each other forever, and with a plain lock a thread
    that asks again at once would always be first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: Deque[object] = collections.deque()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until all who asked before have had their turns; those who ask later wait until the context ends."""
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
