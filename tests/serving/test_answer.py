"""Answer and Figures: what came of requests."""

import dataclasses

import pytest

from mindlora.serving.answer import Figures, await_answer, figures_of
from mindlora.serving.detokenizer import TextDecoder, TokenTexts
from mindlora.serving.request import Sampling
from tests.support.scripted_engine import make_engine, started


@pytest.fixture(scope="module")
def engine():
    with started(make_engine()) as engine:
        yield engine


def ask(engine, text, **fields):
    tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    return engine.submit(tokens, Sampling(temperature=0.0, **{"max_tokens": 40, **fields}))


def token_texts(engine):
    return TokenTexts(TextDecoder(engine.tokenizer), engine.tokenizer)


def test_an_answer_is_told_piece_by_piece_and_whole(engine):
    pieces, stream = [], ask(engine, "there are cats", logprobs=1)
    answer = await_answer(stream, "asked", token_texts(engine), pieces.append)
    assert answer.text == "".join(pieces) == "there are cats" and len(pieces) > 1 and "" not in pieces
    count = len(stream.request.prompt)
    assert (answer.prompt, answer.finish_reason, answer.error, answer.adapter) == ("asked", "stop", None, None)
    assert (answer.prompt_tokens, answer.tokens) == (count, count + 1)  # the end token is one
    assert 0 < answer.first_token_seconds < 10
    tokens = [entry["token"] for entry in answer.logprobs]
    assert "".join(tokens[:-1]) == answer.text and all(entry["logprob"] > -1e-3 for entry in answer.logprobs)
    assert [entry["top"][0]["token"] for entry in answer.logprobs] == tokens


def test_tokens_that_come_together_are_one_piece():
    """A prompt that repeats itself is answered in fewer steps, with the same text and log-probabilities."""
    told = []
    for lookup in (0, 6):
        with started(make_engine(prompt_lookup=lookup)) as engine:
            stream = ask(engine, "cats and cats and cats and cats", logprobs=1)
            pieces = list(stream)
            told.append((told_together(pieces), len(pieces), engine.snapshot()))
    (plain, most, counted), (drafted, fewer, guessed) = told
    assert drafted == plain and fewer < most
    assert (counted.drafted_tokens, counted.accepted_tokens) == (0, 0)
    assert guessed.accepted_tokens == most - fewer and guessed.generated_tokens == counted.generated_tokens == most


def told_together(pieces):
    """Returns what pieces tell together."""
    tokens = [token for piece in pieces for token in piece.tokens]
    logprobs = [sampled for piece in pieces for sampled in piece.logprobs]
    return "".join(piece.text for piece in pieces), tokens, logprobs, pieces[-1].finish_reason


def test_a_failure_is_an_answer_too(engine):
    engine.runner.error = ValueError("broken")
    try:
        answer = await_answer(ask(engine, "hi"), "hi", token_texts(engine))
    finally:
        engine.runner.error = None
    assert (answer.finish_reason, answer.text, answer.tokens, answer.first_token_seconds) == ("error", "", 0, None)
    assert answer.error == "The network could not compute a step: broken"


def test_figures_are_of_all_answers_together(engine):
    streams = [ask(engine, text, max_tokens=most) for text, most in (("hi", 40), ("two cats", 2), ("three", 1))]
    answers = [await_answer(stream, "", token_texts(engine)) for stream in streams]
    figures = figures_of(zip(answers, streams))
    assert (figures.answers, figures.cut) == (3, 2)
    assert figures.prompt_tokens == sum(len(stream.request.prompt) for stream in streams)
    assert figures.tokens == sum(len(stream.request.generated) for stream in streams)
    assert figures.seconds == max(s.request.finished for s in streams) - min(s.request.arrived for s in streams)
    assert figures.first_token_seconds == sorted(answer.first_token_seconds for answer in answers)[1]


def test_figures_are_one_line():
    figures = Figures(3, 30, 60, 2.0, 0.125, 0)
    assert str(figures) == (
        "3 answers, 30 prompt tokens, 60 answer tokens in 2.00 s: 30 tokens/s, first token after 0.12 s (median)"
    )
    assert str(dataclasses.replace(figures, cut=2)).endswith("(median); 2 reached the limit of tokens")
    alone = Figures(1, 5, 7, 1.0, 0.5, 1)
    assert str(alone) == (
        "5 prompt tokens, 7 answer tokens in 1.00 s: 7 tokens/s, first token after 0.50 s; it reached the limit of "
        "tokens"
    )
    assert str(Figures(1, 5, 0, 0.0, None, 0)) == "5 prompt tokens, 0 answer tokens in 0.00 s: 0 tokens/s"
