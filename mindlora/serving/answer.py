"""Answer: what came of a request, whole; and the figures of several."""

import dataclasses
import statistics
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from mindlora.errors import LoraError
from mindlora.serving.stream import Stream


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        prompt (str): What was asked.
        adapter (str or None): Who answered; None for the base.
        text (str): The answer.
        finish_reason (str): "stop", "length", "cancelled" or "error".
        error (str or None): Why it failed, with "error".
        prompt_tokens, cached_tokens, tokens (int): Tokens of the prompt, those of them whose keys and values were in
            the cache already, and tokens of the answer.
        first_token_seconds (float or None): Time from asking to the first token; None if there was none.
        logprobs (list of dict or None): For each token its text, "logprob" and the likeliest ones, "top", if asked for.
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
    """What several answers took together.

    Attributes:
        answers (int): How many.
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
    stream: Stream, prompt: str, tokenizer: Any, write: Optional[Callable[[str], object]] = None
) -> Answer:
    """Waits for an answer.

    Args:
        stream (Stream): Where it comes.
        prompt (str): What was asked.
        tokenizer: Of the engine, for the texts of logprobs.
        write (callable, optional): Takes each piece of text as it comes.

    Returns:
        Answer, also if the request failed.
    """
    texts: List[str] = []
    logprobs: Optional[List[Dict[str, Any]]] = None if stream.request.sampling.logprobs is None else []
    reason, error = "error", None
    try:
        for piece in stream:
            texts.append(piece.text)
            if write and piece.text:
                write(piece.text)
            if logprobs is not None:
                logprobs += [_reported(sampled, tokenizer) for sampled in piece.logprobs or ()]
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
    """Returns what answers took, each given with the stream that it came from."""
    pairs = list(answered)
    answers, requests = [answer for answer, _ in pairs], [stream.request for _, stream in pairs]
    firsts = [answer.first_token_seconds for answer in answers if answer.first_token_seconds is not None]
    return Figures(
        answers=len(answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        tokens=sum(answer.tokens for answer in answers),
        seconds=max(request.finished for request in requests) - min(request.arrived for request in requests),
        first_token_seconds=statistics.median(firsts) if firsts else None,
        cut=sum(answer.finish_reason == "length" for answer in answers),
    )


def _reported(sampled, tokenizer):
    return {
        "token": tokenizer.decode([sampled.token]),
        "logprob": sampled.logprob,
        "top": [{"token": tokenizer.decode([token]), "logprob": logprob} for token, logprob in sampled.top],
    }
