"""/v1/completions: what is sent, and in which form the answer comes."""

import math

import pytest

from mindlora.serving.server import schemas
from tests.support.scripted_engine import BASE, SEQ_LENGTH
from tests.support.served_apps import complete, events, make_app


@pytest.fixture
def app(engine):
    return make_app(engine)


def texts(answer):
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_the_answer_has_openais_form(app):
    content = complete(app).json()
    assert schemas.Completion(**content) and content["id"].startswith("cmpl-")
    assert content["model"] == BASE and content["object"] == "text_completion"
    assert content["choices"] == [{"index": 0, "text": "hello cats", "logprobs": None, "finish_reason": "stop"}]
    usage = content["usage"]
    assert usage["prompt_tokens"] == 7 and usage["completion_tokens"] == 8 and usage["total_tokens"] == 15


def test_each_request_names_its_adapter(app):
    answers = [texts(complete(app, model=model))[0] for model in ("formal", BASE, "pirate", "formal")]
    assert answers == ["Dear Sir, hello cats", "hello cats", "Arr, hello cats", "Dear Sir, hello cats"]


def test_a_prompt_is_a_text_or_token_ids_or_a_list_of_either(app, engine):
    tokens = engine.tokenizer.encode("hello cats")
    assert texts(complete(app, tokens)) == ["hello cats"]
    assert texts(complete(app, [tokens, tokens[:3]])) == ["hello cats", "he"]
    assert texts(complete(app, ["hello cats", "dogs"])) == ["hello cats", "dogs"]
    assert complete(app, ["hello cats", "dogs"]).json()["usage"]["prompt_tokens"] == 7 + len(
        engine.tokenizer.encode("dogs")
    )


def test_the_tokenizers_bos_is_left_out_if_it_is_not_wanted(app):
    counts = [complete(app, **given).json()["usage"]["prompt_tokens"] for given in ({}, {"add_special_tokens": False})]
    assert counts[0] == counts[1] + 1


def test_an_answer_ends_at_max_tokens_or_a_stop(app, engine):
    short = complete(app, max_tokens=3).json()["choices"][0]
    assert (short["text"], short["finish_reason"]) == ("he", "length")
    assert len(complete(app, max_tokens=None).json()["choices"][0]["text"]) == len("hello cats")
    for stop in (" c", ["x", " c"]):
        stopped = complete(app, stop=stop).json()["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == ("hello", "stop")
    cats = engine.tokenizer.encode(" cats", add_special_tokens=False)
    assert texts(complete(app, stop_token_ids=cats)) == ["hello"]
    longer = complete(app, ignore_eos=True, max_tokens=16).json()["choices"][0]
    assert (longer["text"], longer["finish_reason"]) == ("hello cats" * 2, "length")


def test_16_tokens_are_the_default_as_in_openais_api(app):
    content = complete(app, ignore_eos=True, max_tokens=None).json()
    assert content["usage"]["completion_tokens"] == 16


def test_n_answers_to_each_prompt_share_it(app, engine):
    content = complete(app, ["one long prompt about cats", "dogs"], n=3, model="pirate").json()
    assert [choice["index"] for choice in content["choices"]] == list(range(6))
    found = [choice["text"] for choice in content["choices"]]
    assert found == ["Arr, one long prompt about cats"] * 3 + ["Arr, dogs"] * 3
    before = engine.snapshot()
    complete(app, "quite another long prompt about cats", n=3)
    after = engine.snapshot()
    count = len(engine.tokenizer.encode("quite another long prompt about cats"))
    assert after.prompt_tokens - before.prompt_tokens == 3 * count
    # The second and third found the whole blocks of the first: all but the last token, at most.
    assert after.cached_tokens - before.cached_tokens == 2 * ((count - 1) // 4 * 4)


def test_cached_tokens_are_reported(app):
    prompt = "something that nobody has asked before"
    counts = [complete(app, prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert counts[0] == 0 and counts[1] > 20


def test_a_seed_gives_the_same_text_again(app):
    def drawn(**fields):
        # So hot that every token is about equally likely.
        return texts(complete(app, **{"temperature": 100.0, "ignore_eos": True, "max_tokens": 30, **fields}))

    assert drawn(seed=-5) == drawn(seed=-5) != drawn(seed=6)
    assert len(set(drawn(seed=7, n=3))) == 3
    assert drawn(seed=7, n=2)[0] == drawn(seed=7)[0]
    assert drawn(temperature=0.0, top_k=-1, top_p=0.5, repetition_penalty=1.0)[0].startswith("hello cats")


def test_penalties_reach_the_sampler(app):
    # 50 is what sets the scripted token apart: a penalty of its like lets the others win.
    plain, punished = (texts(complete(app, "aaaaaaaa", **given))[0] for given in ({}, {"repetition_penalty": 100.0}))
    assert plain == "aaaaaaaa" and punished != plain


def test_logprobs(app, engine):
    content = complete(app, logprobs=2).json()["choices"][0]
    found = schemas.CompletionLogprobs(**content["logprobs"])
    assert found.tokens == ["<s>", "h", "e", "l", "l", "o", " cats", "</s>"]
    assert all(math.isclose(value, 0.0, abs_tol=1e-9) for value in found.token_logprobs)
    assert [len(top) for top in found.top_logprobs] == [2] * 8 and all(
        token in top for token, top in zip(found.tokens, found.top_logprobs)
    )
    assert found.text_offset == [0, 0, 1, 2, 3, 4, 5, 10]
    assert complete(app, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0].keys() == {"<s>"}


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_and_alternatives_are_those_of_tokens_within_characters_too(app, engine, echo):
    text = "é😀a温b"
    prompt = engine.tokenizer.encode(text, add_special_tokens=False)
    content = complete(app, prompt, logprobs=5, echo=echo, max_tokens=len(prompt)).json()["choices"][0]
    shown = schemas.CompletionLogprobs(**content["logprobs"])
    assert content["text"] == text * (1 + echo)
    assert shown.text_offset[: len(prompt)] == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 4]
    for token, top in zip(shown.tokens, shown.top_logprobs):
        assert top is None or token in top and len(top) in (5, 6) and list(top.values()) == sorted(top.values())[::-1]
    whole = [(token, at) for token, at in zip(shown.tokens, shown.text_offset) if not token.startswith("bytes:")]
    assert [content["text"][at] for _, at in whole] == [token for token, _ in whole] == ["a", "b"] * (1 + echo)


def test_echo_puts_the_prompt_first(app, engine):
    assert texts(complete(app, ["hello cats", "dogs"], echo=True)) == ["hello catshello cats", "dogsdogs"]
    tokens = engine.tokenizer.encode("dogs", add_special_tokens=False)
    assert texts(complete(app, tokens, echo=True)) == ["dogsdogs"]
    streamed = events(complete(app, "dogs", echo=True, stream=True).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "dogsdogs"


def test_echo_with_logprobs_scores_the_prompt(app, engine):
    """After a token of the prompt the scripted engine expects the same again: its logit is 5, all others are 0."""
    content = complete(app, "aab", echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    scores = schemas.CompletionLogprobs(**content["logprobs"])
    assert content["text"] == "aab" and content["finish_reason"] == "length"
    assert scores.tokens == ["<s>", "a", "a", "b"] and scores.text_offset == [0, 0, 1, 2]
    total = math.log(math.exp(5) + len(engine.tokenizer) - 1)
    expected = [None, -total, 5 - total, -total]
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-5)
    assert [set(top) for top in scores.top_logprobs[1:]] == [{"<s>", "a"}, {"a"}, {"a", "b"}]


def test_an_answer_goes_on_where_the_scored_prompt_ends(app):
    fields = {"prompt": ["dogs", "hello cats"], "echo": True, "logprobs": 0, "n": 2}
    whole = complete(app, **fields).json()["choices"]
    plain = complete(app, **{**fields, "echo": False}).json()["choices"]
    for choice, answer in zip(whole, plain):
        assert choice["text"].endswith(answer["text"])
        tokens, scores = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        count = len(answer["logprobs"]["tokens"])
        assert tokens[-count:] == answer["logprobs"]["tokens"] and tokens[:-count] == answer["logprobs"]["tokens"][:-1]
        assert scores[-count:] == answer["logprobs"]["token_logprobs"] and None not in scores[1:]
    streamed = events(complete(app, **fields, stream=True).text)
    for choice in whole:
        parts = [part for chunk in streamed for part in chunk["choices"] if part["index"] == choice["index"]]
        assert sum((part["logprobs"]["token_logprobs"] for part in parts), []) == choice["logprobs"]["token_logprobs"]


def test_a_bias_is_added_to_the_logits(app, engine):
    """50 is what sets the scripted token apart."""
    dog, cat = (engine.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("d", "c"))
    assert texts(complete(app, logit_bias={str(dog): 49}, temperature=0)) == ["hello cats"]
    answer = complete(app, logit_bias={str(dog): 60}, temperature=0, max_tokens=3, logprobs=0).json()["choices"][0]
    assert answer["text"] == "ddd"
    # As the model sees it, without the bias.
    assert max(answer["logprobs"]["token_logprobs"]) < -49
    assert texts(complete(app, logit_bias={str(dog): 60, str(cat): 70}, temperature=0, max_tokens=2)) == ["cc"]


def test_a_streamed_answer_says_the_same_in_pieces(app):
    fields = {"prompt": ["hello cats", "dogs"], "n": 2, "model": "formal", "logprobs": 1}
    whole = complete(app, **fields).json()
    answer = complete(app, **fields, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert all(schemas.Completion(**chunk) and "usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert len(parts) > 3 and "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        for field in ("tokens", "text_offset", "token_logprobs"):
            assert sum((part["logprobs"][field] for part in parts), []) == choice["logprobs"][field]


def test_usage_is_in_the_last_chunk_if_it_is_wanted(app):
    chunks = events(complete(app, stream=True, stream_options={"include_usage": True}).text)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 8


def test_the_window_bounds_an_answer(app):
    content = complete(app, "x", max_tokens=SEQ_LENGTH - 2, ignore_eos=True).json()
    assert content["usage"]["total_tokens"] == SEQ_LENGTH
