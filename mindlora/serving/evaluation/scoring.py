"""How likely texts are: the log-probabilities that a base and its adapters give to tokens, all in one pass."""

import collections
from typing import Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mindlora.data.conversion import progress
from mindlora.serving.answer import Stream
from mindlora.serving.engine import Engine
from mindlora.serving.request import Request, Sampling

# Who is asked: the name of an adapter, or None for the base.
Model = Optional[str]


class Passage(NamedTuple):
    """Tokens, of which those from index ``first`` on are scored; at most seq_length + 1, and ``first`` is 1 or more."""

    tokens: List[int]
    first: int = 1


class Scores(NamedTuple):
    """What a model gives to the n scored tokens of a passage.

    Attributes:
        logprobs (array [n]): float64, log p(token | those before it), in nats.
        likeliest (array [n]): int64, the token that the model would have chosen.
    """

    logprobs: np.ndarray
    likeliest: np.ndarray


def score(engine: Engine, passages: Sequence[Passage], models: Sequence[Model]) -> Dict[Model, List[Scores]]:
    """Returns the scores of each passage by each model, computed together by a started engine.

    Raises LoraError: what Engine.submit raises, and the error of a request that failed.
    """
    asked = [
        (passage.tokens, Sampling(max_tokens=0, prompt_logprobs=1, scored_from=passage.first), model)
        for passage in passages
        for model in models
    ]
    scores: Dict[Model, List[Scores]] = {model: [] for model in models}
    for request, _ in progress(ask(engine, asked), "scoring", len(asked)):
        sampled = [request.prompt_logprobs[index] for index in sorted(request.prompt_logprobs)]
        logprobs = np.array([one.logprob for one in sampled], np.float64)
        likeliest = np.array([one.top[0][0] for one in sampled], np.int64)
        scores[request.adapter].append(Scores(logprobs, likeliest))
    return scores


def ask(engine: Engine, requests: Iterable[Tuple[List[int], Sampling, Model]]) -> Iterator[Tuple[Request, str]]:
    """Yields what became of (prompt, sampling, model), in order: the finished request and the text of its answer.

    Where there are more requests than may wait, the rest is asked as others end. Raises as ``score`` does.
    """
    waiting: Deque[Stream] = collections.deque()
    for tokens, sampling, model in requests:
        if len(waiting) == engine.scheduler.max_waiting:
            yield _finished(waiting.popleft())
        waiting.append(engine.submit(tokens, sampling, model))
    while waiting:
        yield _finished(waiting.popleft())


def _finished(stream: Stream) -> Tuple[Request, str]:
    return stream.request, stream.text()
