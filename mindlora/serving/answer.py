"""The answer to a request: as it arrives (Stream), complete (Answer), and the costs of several (Figures)."""

import dataclasses
import statistics
import threading
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import LoraError
from mindlora.serving.request import Request
from mindlora.serving.sampling import Sampled

if TYPE_CHECKING:
    from mindlora.serving.detokenizer import TokenTexts


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part that one step adds to an answer.

    Attributes:
        text (str): Text that is final; may be empty.
        tokens (list of int): The new tokens, including an end token.
        logprobs (list of Sampled or None): One for each token, if the request asks for logprobs.
        prompt_logprobs (list of Sampled or None): In the first piece, one for each token of the prompt, if the request
            asks for prompt_logprobs. Tokens before scored_from have the logprob None.
        vectors (array or None): In the last piece, float32 [tokens, width], if the request is a reading.
        finish_reason (str or None): "stop", "length", "cancelled" or "error" in the last piece, else None.
        error (Exception or None): Why the request failed, with "error".
    """

    text: str = ""
    tokens: List[int] = dataclasses.field(default_factory=list)
    logprobs: Optional[List[Sampled]] = None
    prompt_logprobs: Optional[List[Sampled]] = None
    vectors: Optional[np.ndarray] = None
    finish_reason: Optional[str] = None
    error: Optional[Exception] = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """Returns several consecutive pieces of an answer as one piece."""
    if len(pieces) == 1:
        return pieces[0]
    tokens: List[int] = []
    logprobs: Optional[List[Sampled]] = None
    for piece in pieces:
        tokens += piece.tokens
        if piece.logprobs is not None:
            logprobs = [*(logprobs or []), *piece.logprobs]
    return Piece(
        "".join(piece.text for piece in pieces),
        tokens,
        logprobs,
        pieces[0].prompt_logprobs,
        finish_reason=pieces[-1].finish_reason,
        error=pieces[-1].error,
    )


Listener = Callable[[Piece], None]


class Stream:
    """The pieces of one answer: iterate over them outside the engine's thread, or add a listener."""

    def __init__(self, request: Request, cancel: Callable[[Request], None]):
        self.request = request
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: List[Piece] = []
        self._listener: Optional[Listener] = None
        self._ended = False

    def cancel(self) -> None:
        """Ends the request, at any moment and from any thread; has no effect if it has ended."""
        self._cancel(self.request)

    def add_listener(self, listener: Listener) -> None:
        """Passes all pieces, including earlier ones, to ``listener``, one at a time and in order.

        It is called in the engine's thread, which waits for it, or in the thread that calls cancel or this method.
        """
        with self._changed:
            self._listener = listener
            for piece in self._pieces:
                listener(piece)
            self._pieces = []

    def put(self, piece: Piece) -> None:
        """Adds a piece; pieces after the last one are dropped."""
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
        """Yields pieces as they arrive, up to the last one; then raises the request's error, if it failed."""
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
        """Waits for the end and returns the whole text, or raises the request's error, if it failed."""
        return "".join(piece.text for piece in self)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        adapter (str or None): The adapter that answered; None for the base.
        finish_reason (str): "stop", "length", "cancelled" or "error".
        error (str or None): Why it failed, with "error".
        prompt_tokens, cached_tokens, tokens (int): Tokens of the prompt, those whose keys and values were already in
            the cache, and tokens of the answer.
        first_token_seconds (float or None): Time from the request to the first token; None if there was none.
        logprobs (list of dict or None): For each token its text, "logprob" and the likeliest ones, "top", if requested.
    """

    prompt: str
    adapter: Optional[str]
    text: str
    finish_reason: str
    error: Optional[str]
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token_seconds: Optional[float]
    logprobs: Optional[List[Dict[str, Any]]] = None


@dataclasses.dataclass(frozen=True)
class Figures:
    """The costs of several answers together.

    Attributes:
        prompt_tokens, tokens (int): Tokens of prompts and of answers.
        seconds (float): From the first request to the end of the last answer.
        first_token_seconds (float or None): Median of the times to the first token.
        cut (int): Answers that reached max_tokens or the end of the window.
    """

    answers: int
    prompt_tokens: int
    tokens: int
    seconds: float
    first_token_seconds: Optional[float]
    cut: int

    def __str__(self) -> str:
        many = f"{self.answers} answers, " if self.answers > 1 else ""
        first = ""
        if self.first_token_seconds is not None:
            median = " (median)" if self.answers > 1 else ""
            first = f", first token after {self.first_token_seconds:.2f} s{median}"
        who = "it" if self.answers == 1 else self.cut
        ended = f"; {who} reached the limit of tokens" if self.cut else ""
        return (
            f"{many}{self.prompt_tokens} prompt tokens, {self.tokens} answer tokens in {self.seconds:.2f} s: "
            f"{self.tokens / max(self.seconds, 1e-9):.0f} tokens/s{first}{ended}"
        )


def await_answer(
    stream: Stream, prompt: str, token_texts: "TokenTexts", write: Optional[Callable[[str], object]] = None
) -> Answer:
    """Waits for an answer and returns it, even if the request failed; ``write`` takes each piece of its text."""
    texts: List[str] = []
    logprobs: Optional[List[Dict[str, Any]]] = None if stream.request.sampling.logprobs is None else []
    reason = "error"
    error = None
    try:
        for piece in stream:
            texts.append(piece.text)
            if write and piece.text:
                write(piece.text)
            if logprobs is not None:
                logprobs += [_reported(sampled, token_texts) for sampled in piece.logprobs or ()]
            reason = piece.finish_reason or reason
    except LoraError as failure:
        error = str(failure)
    request = stream.request
    return Answer(
        prompt=prompt,
        adapter=request.adapter,
        text="".join(texts),
        finish_reason=reason,
        error=error,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached,
        tokens=len(request.generated),
        first_token_seconds=request.first_token - request.arrived if request.first_token else None,
        logprobs=logprobs,
    )


def figures_of(answered: Iterable[Tuple[Answer, Stream]]) -> Figures:
    """Returns the figures of answers, each given with its stream."""
    pairs = list(answered)
    answers = [answer for answer, _ in pairs]
    requests = [stream.request for _, stream in pairs]
    firsts = [answer.first_token_seconds for answer in answers if answer.first_token_seconds is not None]
    return Figures(
        answers=len(answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        tokens=sum(answer.tokens for answer in answers),
        seconds=max(request.finished for request in requests) - min(request.arrived for request in requests),
        first_token_seconds=statistics.median(firsts) if firsts else None,
        cut=sum(answer.finish_reason == "length" for answer in answers),
    )


def _reported(sampled, token_texts):
    return {
        "token": token_texts.name(sampled.token),
        "logprob": sampled.logprob,
        "top": [{"token": token_texts.name(token), "logprob": logprob} for token, logprob in sampled.top],
    }
