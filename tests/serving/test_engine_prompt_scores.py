"""Log-probabilities of given texts: those of the logits that MindFormers' network has without a cache."""

import random

import numpy as np
import pytest

from mindlora.core.errors import RequestError
from mindlora.serving.request import Sampling
from tests.conftest import in_mode
from tests.support import tiny_serving
from tests.support.tiny_serving import SEQ_LENGTH, adapter, base_weights, merged, save_adapter, save_base, vocabulary

ADAPTERS = {
    "first": adapter(1),
    "head": tiny_serving.with_head(adapter(2, {"attention.wq": 4})),
    "tables": tiny_serving.with_tables(adapter(4, {"attention.wv": 4})),
    "dora": tiny_serving.with_magnitudes(tiny_serving.with_head(adapter(3, {"attention.wo": 4, "feed_forward.w1": 2}))),
}


@pytest.fixture(scope="module")
def engine(library, mindformers, tmp_path_factory):
    """An engine with few blocks, whose steps take few tokens and whose logits exist for five tokens at a time."""
    folder = tmp_path_factory.mktemp("scores")
    for name, made in ADAPTERS.items():
        save_adapter(folder / "adapters", name, made)
    with in_mode(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindlora.serving.engine.FEW_TOKENS", 5)
        patch.setattr("mindlora.serving.network.FEW_TOKENS", 6)
        made = tiny_serving.engine(save_base(folder / "base.ckpt", base_weights()), folder / "adapters", num_blocks=40)
        made.start()
        yield made
        made.stop()


@pytest.fixture(scope="module")
def expected(engine):
    """A function: tokens and adapter -> log-probabilities [tokens, vocabulary] after each token, in float64."""
    plain = tiny_serving.Plain()
    weights = {name: merged(base_weights(), made) for name, made in {None: None, **ADAPTERS}.items()}

    def logprobs(tokens, name):
        with in_mode(1):
            logits = plain.logits(weights[name], tokens).astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    return logprobs


def text(length, seed):
    return random.Random(seed).choices(range(3, vocabulary()), k=length)


def check(request, expected, first):
    """Compares what a request reports with the logits of the whole text."""
    table = expected(request.prompt[:-1], request.adapter)
    assert sorted(request.prompt_logprobs) == list(range(first, len(request.prompt)))
    for index, sampled in request.prompt_logprobs.items():
        assert sampled.token == request.prompt[index]
        assert sampled.logprob == pytest.approx(table[index - 1, sampled.token], abs=2e-4)
        ((likeliest, logprob),) = sampled.top
        assert likeliest == table[index - 1].argmax() and logprob == pytest.approx(table[index - 1].max(), abs=2e-4)


def test_texts_of_all_lengths_and_adapters_are_scored_together(engine, expected):
    jobs = [
        (text(length, length), first, name)
        for length, first in ((2, 1), (13, 1), (SEQ_LENGTH + 1, 1), (30, 21), (31, 30))
        for name in (None, *ADAPTERS)
    ]
    streams = [
        engine.submit(tokens, Sampling(max_tokens=0, prompt_logprobs=1, scored_from=first), name)
        for tokens, first, name in jobs
    ]
    # ``expected`` is computed in PyNative, which is the mode of all threads: not while the engine computes.
    for (piece,) in [list(stream) for stream in streams]:
        assert (piece.finish_reason, piece.tokens) == ("length", [])
    for stream, (_, first, _) in zip(streams, jobs):
        check(stream.request, expected, first)


def test_a_beginning_that_is_not_scored_comes_from_the_cache(engine, expected):
    beginning = text(21, 7)
    cached = []
    for seed, first in ((1, 21), (2, 21), (3, 10)):
        sampling = Sampling(max_tokens=0, prompt_logprobs=1, scored_from=first)
        stream = engine.submit([*beginning, *text(5, seed)], sampling, "first")
        stream.text()
        check(stream.request, expected, first)
        cached.append(stream.request.cached)
    assert cached == [0, 20, 8]


def test_an_answer_goes_on_behind_a_prompt_that_is_scored(engine, expected):
    prompt = text(9, 3)
    scored = engine.submit(prompt, Sampling(max_tokens=4, temperature=0.0, prompt_logprobs=1))
    alone = engine.submit(prompt, Sampling(max_tokens=4, temperature=0.0))
    scored.text(), alone.text()
    assert scored.request.generated == alone.request.generated and len(alone.request.generated) == 4
    check(scored.request, expected, 1)


@pytest.mark.parametrize(
    "length, sampling, words",
    [
        (1, {}, "has 1 tokens: give it at least two"),
        (SEQ_LENGTH + 2, {}, "has at most 64"),
        (5, {"scored_from": 0}, "scored_from is 0"),
        (5, {"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        (5, {"prompt_logprobs": None}, "max_tokens is 0: ask for at least one token"),
    ],
)
def test_what_cannot_be_scored_is_refused_at_once(engine, length, sampling, words):
    with pytest.raises(RequestError, match=words):
        engine.submit(text(length, 0), Sampling(**{"max_tokens": 0, "prompt_logprobs": 1, **sampling}))
