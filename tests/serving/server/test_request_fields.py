"""Fields of requests that OpenAI and vLLM have beside the main ones: what each does, or that it changes nothing."""

import pytest

from tests.support.scripted_engine import BASE
from tests.support.served_apps import CHAT, ask, chat, complete, error_of, events, make_app


@pytest.fixture
def app(engine):
    return make_app(engine)


def texts(answer):
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"verbosity": "low"},
        {"service_tier": "flex"},
        {"service_tier": "priority"},
        {"top_logprobs": 0},
        {"top_logprobs": 0, "logprobs": False},
        {"min_p": 0.0, "min_tokens": 0, "bad_words": [], "return_token_ids": False},
        {"cache_salt": "x"},
        {"prediction": {"type": "content", "content": "user"}},
    ],
)
def test_what_changes_nothing_is_taken(app, fields):
    plain = chat(app).json()["choices"]
    assert chat(app, **fields).json()["choices"] == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"verbosity": "loud"},
        {"service_tier": "first class"},
        {"min_p": 2},
        {"min_tokens": -1},
        {"bad_words": [""]},
        {"cache_salt": ""},
        {"allowed_token_ids": []},
        {"return_token_ids": 1},
        {"top_logprobs": 1},
    ],
)
def test_a_value_without_a_meaning_is_refused_by_its_field(app, fields):
    answer = chat(app, **fields)
    assert answer.status_code == 400 and error_of(answer)["param"].startswith(next(iter(fields)))


def test_min_tokens_has_the_answer_go_on(app, engine):
    assert texts(complete(app, "a b")) == ["a b"]
    assert len(texts(complete(app, "a b", min_tokens=12))[0]) > len("a b")
    to_the_first = len(engine.tokenizer.encode("a b"))
    assert texts(complete(app, "a b a b", stop=" b")) == ["a"]
    assert texts(complete(app, "a b a b", stop=" b", min_tokens=to_the_first)) == ["a b a"]
    answer = complete(app, "a b", min_tokens=41)
    assert answer.status_code == 400 and "min_tokens is 41" in error_of(answer)["message"]


def test_min_p_leaves_the_likeliest(app):
    # The scripted token is e to the 50 times as likely as any other; so hot, all are about equally likely.
    hot = {"temperature": 100.0, "seed": 3}
    assert texts(complete(app, **hot)) != ["hello cats"] == texts(complete(app, min_p=0.9, **hot))


@pytest.mark.parametrize("word", ["cats", " cats"])
def test_a_bad_word_is_not_said(app, word):
    assert texts(complete(app)) == ["hello cats"]
    said = texts(complete(app, bad_words=[word]))[0]
    assert "hello" in said and "cats" not in said
    assert texts(complete(app, bad_words=["dogs", "catsx"])) == ["hello cats"]


def test_the_answer_consists_of_allowed_tokens(app, engine):
    allowed = engine.tokenizer.encode("hello", add_special_tokens=False)
    assert set(texts(complete(app, allowed_token_ids=allowed))[0]) <= set("hello")
    # Its end comes where the model has it.
    all_of_it = engine.tokenizer.encode("hello cats", add_special_tokens=True)
    answer = complete(app, allowed_token_ids=all_of_it).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("hello cats", "stop")


def test_a_stop_text_can_be_shown(app):
    fields = {"stop": [" ca", "lo"], "include_stop_str_in_output": True}
    assert texts(complete(app, **fields)) == ["hello"]
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in events(complete(app, stream=True, **fields).text)) == "hello"
    )


def test_a_salt_keeps_the_cache_apart(app, engine):
    def cached(**fields):
        return complete(app, "there are cats and dogs there", **fields).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    for model in (BASE, "pirate"):
        salts = [{"cache_salt": f"one {model}"}, {"cache_salt": f"another {model}"}]
        assert [cached(model=model, **salt) > 0 for salt in (*salts, *salts)] == [False, False, True, True]


def test_token_ids_are_those_of_prompt_and_answer(app, engine):
    encode = engine.tokenizer.encode
    fields = {"prompt": ["hello cats", "dogs"], "n": 2, "max_tokens": 40, "return_token_ids": True}
    whole = complete(app, **fields).json()["choices"]
    for choice, prompt in zip(whole, ["hello cats"] * 2 + ["dogs"] * 2):
        tokens = encode(prompt)
        assert choice["prompt_token_ids"] == tokens and choice["token_ids"] == [*tokens, engine.tokenizer.eos_token_id]
    chunks = events(complete(app, stream=True, **fields).text)
    for choice in whole:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [part.get("prompt_token_ids") for part in parts] == [choice["prompt_token_ids"]] + [None] * (
            len(parts) - 1
        )
        assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
    assert not {"token_ids", "prompt_token_ids"} & complete(app).json()["choices"][0].keys()


def test_token_ids_of_a_chat(app, engine):
    whole = chat(app, "é", n=2, return_token_ids=True).json()
    prompt = ask(app, "/tokenize", {"messages": [{"role": "user", "content": "é"}]}).json()["tokens"]
    assert whole["prompt_token_ids"] == prompt
    chunks = events(chat(app, "é", n=2, return_token_ids=True, stream=True).text)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert sum((part.get("token_ids", []) for part in parts), []) == choice["token_ids"]
        assert choice["token_ids"][: len(prompt) - 1] == prompt[: len(choice["token_ids"])][: len(prompt) - 1]


@pytest.mark.parametrize("arguments", ["", None, "{}", ...])
def test_a_call_in_the_history_may_have_no_arguments(app, arguments):
    function = {"name": "f"} if arguments is ... else {"name": "f", "arguments": arguments}
    calls = [{"id": "a", "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    assert ask(app, CHAT, {"model": BASE, "messages": messages, "max_tokens": 3}).status_code == 200
