"""Forgetting: how far an adapter has moved the model away from what its base would say itself, without any data."""

from typing import List, Sequence

import numpy as np

from mindlora.serving.engine import Engine
from mindlora.serving.evaluation.scoring import Model, Passage, Scores, ask, score
from mindlora.serving.evaluation.statistics import Measure, measure
from mindlora.serving.evaluation.texts import start_tokens
from mindlora.serving.request import Sampling

NAME = "forgetting"
SOURCE = "samples of the base"


def measure_forgetting(engine: Engine, samples: int, max_tokens: int, models: Sequence[Model], seed: int) -> Measure:
    r"""Returns the Kullback-Leibler divergence of each model from the base, in nats per token, on the base's samples.

        KL(base || tuned) = E_{x ~ base} [log p_base(x) - log p_tuned(x)]

    The expectation is the mean over the tokens of ``samples`` texts that the base says at temperature 1, each from the
    beginning and of up to ``max_tokens`` tokens, drawn by ``seed``; they are the examples that are resampled. Every
    adapter is measured on the same ones. It is 0 for the base; by chance it can be a little below 0.

    Source: Kullback and Leibler, On Information and Sufficiency, 1951.
    """
    passages = draw_samples(engine, samples, max_tokens, seed)
    scores = score(engine, passages, models)
    sums = {model: _sums(scores[model]) for model in models}
    moved = {model: sums[None] - sums[model] for model in models}
    tokens = np.array([len(one.logprobs) for one in scores[None]], np.float64)
    return measure(NAME, SOURCE, True, moved, tokens, seed=seed)


def _sums(scores: Sequence[Scores]) -> np.ndarray:
    return np.array([one.logprobs.sum() for one in scores])


def draw_samples(engine: Engine, samples: int, max_tokens: int, seed: int) -> List[Passage]:
    """Returns texts that the base says, from nothing but the token that begins a text; all their tokens are scored.

    If the tokenizer has no such token, each text begins with another token of the vocabulary, which is not scored.
    """
    start = start_tokens(engine.tokenizer)
    first = np.random.default_rng(seed).integers(engine.runner.vocab_size, size=samples).tolist()
    length = min(max_tokens, engine.seq_length - 1)
    requests = [(start or [first[i]], Sampling(max_tokens=length, seed=seed + i), None) for i in range(samples)]
    return [Passage(list(request.tokens), 1) for request, _ in ask(engine, requests)]
