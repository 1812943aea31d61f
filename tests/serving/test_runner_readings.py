"""Hidden states and scores of texts: those of the network without a cache, whatever else runs."""

import numpy as np
import pytest

from mindlora.core.errors import RequestError
from mindlora.serving.request import Reading, Sampling
from tests.conftest import in_mode
from tests.serving.test_engine_prompt_scores import text
from tests.support import tiny_serving
from tests.support.tiny_serving import SEQ_LENGTH, adapter, base_weights, merged, save_adapter, save_base, with_score

ADAPTERS = {
    "texts": with_score(adapter(1)),
    "words": with_score(adapter(2, {"attention.wv": 4}), of_tokens=True),
    "writer": adapter(3),
}


@pytest.fixture(scope="module")
def engine(library, mindformers, tmp_path_factory):
    """An engine whose steps take few tokens, so that texts come in several."""
    folder = tmp_path_factory.mktemp("readings")
    for name, made in ADAPTERS.items():
        save_adapter(folder / "adapters", name, made)
    with in_mode(0):
        base = save_base(folder / "base.ckpt", base_weights())
        made = tiny_serving.engine(base, folder / "adapters", num_blocks=40, prompt_lookup=3)
        made.start()
        yield made
        made.stop()


@pytest.fixture(scope="module")
def hidden(engine):
    """A function: tokens and adapter -> hidden states [tokens, HIDDEN], read from logits of a head that is known."""
    plain = tiny_serving.Plain()
    inverse = np.linalg.pinv(base_weights()["lm_head.weight"].astype(np.float64))
    weights = {name: merged(base_weights(), without_score(made)) for name, made in {None: None, **ADAPTERS}.items()}

    def states(tokens, name):
        with in_mode(1):
            return plain.logits(weights[name], tokens).astype(np.float64) @ inverse.T

    return states


def without_score(made):
    if made is not None:
        made = type(made)(made.tensors, made.alphas)
    return made


def read(engine, tokens, name, scores, every):
    return engine.submit(tokens, Sampling(max_tokens=0, reading=Reading(scores, every)), name)


def vectors(stream):
    (piece,) = stream
    assert (piece.finish_reason, piece.tokens) == ("length", [])
    return piece.vectors


def test_texts_of_all_lengths_and_kinds_are_read_beside_answers(engine, hidden):
    jobs = [
        (text(length, length), *job)
        for length in (1, 2, 13, SEQ_LENGTH)
        for job in (
            *((name, False, every) for name in (None, "writer") for every in (False, True)),
            *((name, True, every) for name in ("texts", "words") for every in (False, True)),
        )
    ]
    # It guesses its next tokens, which are in the steps of the texts too.
    answer = engine.submit(3 * text(5, 3), Sampling(max_tokens=30, temperature=0.0, ignore_eos=True), "writer")
    streams = [read(engine, *job) for job in jobs]
    found = [vectors(stream) for stream in streams]
    assert answer.text() and engine.snapshot().drafted_tokens > 0
    for (tokens, name, scores, every), array in zip(jobs, found):
        expected = hidden(tokens, name)[slice(None) if every else slice(-1, None)]
        if scores:
            modules = ADAPTERS[name].saved_modules
            expected = expected @ modules["score.weight"].T + modules.get("score.bias", 0)
        np.testing.assert_allclose(array, expected, atol=3e-4, err_msg=f"{name} {len(tokens)}")


def test_a_beginning_comes_from_the_cache_if_the_last_token_is_all_that_is_read(engine):
    tokens = text(22, 7)
    first, second, whole = (read(engine, tokens, "texts", True, every) for every in (False, False, True))
    last = vectors(first)
    np.testing.assert_allclose(vectors(second), last, atol=1e-5)
    np.testing.assert_allclose(vectors(whole)[-1:], last, atol=1e-5)
    assert second.request.cached == 20 and whole.request.cached == 0


@pytest.mark.parametrize(
    "name, sampling, words",
    [
        (None, Sampling(max_tokens=0, reading=Reading(True, False)), "The base has no score head"),
        ("writer", Sampling(max_tokens=0, reading=Reading(True, False)), "writer has no score head"),
        ("texts", Sampling(max_tokens=0, reading=Reading(False, False)), "texts is a classifier, which writes no text"),
        ("words", Sampling(max_tokens=3), "words is a classifier, which writes no text"),
    ],
)
def test_an_adapter_for_something_else_is_refused(engine, name, sampling, words):
    with pytest.raises(RequestError, match=words):
        engine.submit(text(5, 0), sampling, name).text()
