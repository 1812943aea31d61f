"""Stream: the answer to one request, as it comes."""

import dataclasses
import threading
from typing import Callable, Iterator, List, Optional

from mindlora.serving.request import Request
from mindlora.serving.sampling import Sampled


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one step adds to an answer.

    Attributes:
        text (str): Text that is final; may be empty.
        tokens (list of int): The new tokens, an end token included.
        logprobs (list of Sampled or None): One for each token, if the request asks for logprobs.
        finish_reason (str or None): "stop", "length", "cancelled" or "error" in the last piece, else None.
        error (Exception or None): Why the request failed, with "error".
    """

    text: str = ""
    tokens: List[int] = dataclasses.field(default_factory=list)
    logprobs: Optional[List[Sampled]] = None
    finish_reason: Optional[str] = None
    error: Optional[Exception] = None


Listener = Callable[[Piece], None]


class Stream:
    """The pieces of one answer: iterate over them in another thread than the engine's, or add a listener.

    Args:
        request (Request): The request.
        cancel (callable): Takes the request and ends it.

    Attributes:
        request (Request): The request.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None]):
        self.request, self._cancel = request, cancel
        self._changed = threading.Condition()
        self._pieces: List[Piece] = []
        self._listener: Optional[Listener] = None
        self._ended = False

    def cancel(self) -> None:
        """Ends the request, at any moment and from any thread; does nothing if it has ended."""
        self._cancel(self.request)

    def add_listener(self, listener: Listener) -> None:
        """Has all pieces, those that have come already included, given to ``listener``, one at a time and in order.

        It is called in the engine's thread, which waits for it, or in that of whoever calls cancel or this method.
        """
        with self._changed:
            self._listener = listener
            for piece in self._pieces:
                listener(piece)
            self._pieces = []

    def put(self, piece: Piece) -> None:
        """Adds a piece; what comes after the last one is dropped."""
        with self._changed:
            if self._ended:
                return
            self._ended = piece.finish_reason is not None
            if self._listener:
                self._listener(piece)
            else:
                self._pieces.append(piece)
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Piece]:
        """Yields pieces as they come, up to the last one.

        Raises:
            Exception: The request's error, after the last piece, if it failed.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces)
                piece = self._pieces.pop(0)
            yield piece
            if piece.error is not None:
                raise piece.error
            if piece.finish_reason is not None:
                return

    def text(self) -> str:
        """Waits for the end and returns the whole text.

        Raises:
            Exception: The request's error, if it failed.
        """
        return "".join(piece.text for piece in self)
