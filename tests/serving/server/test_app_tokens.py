"""/tokenize and /detokenize, as vLLM has them."""

import pytest

from tests.support.scripted_engine import BASE, SEQ_LENGTH
from tests.support.served_apps import ask, complete, error_of, make_app


@pytest.fixture
def app(engine):
    return make_app(engine)


def test_a_text_becomes_the_tokens_that_a_completion_gets(app, engine):
    content = ask(app, "/tokenize", {"model": BASE, "prompt": "hello cats", "return_token_strs": True}).json()
    assert content["tokens"] == engine.tokenizer.encode("hello cats") and content["max_model_len"] == SEQ_LENGTH
    assert content["count"] == complete(app, "hello cats").json()["usage"]["prompt_tokens"]
    assert content["token_strs"] == ["<s>", "h", "e", "l", "l", "o", " cats"]
    bare = ask(app, "/tokenize", {"prompt": "hello cats", "add_special_tokens": False}).json()
    assert bare["tokens"] == content["tokens"][1:] and bare["token_strs"] is None


def test_a_conversation_becomes_the_tokens_that_a_chat_gets(app):
    messages = [{"role": "user", "content": "hi"}]
    tokens = ask(app, "/tokenize", {"model": "pirate", "messages": messages}).json()["tokens"]
    body = {"model": "pirate", "messages": messages, "max_tokens": 1}
    asked = ask(app, "/v1/chat/completions", body).json()
    assert len(tokens) == asked["usage"]["prompt_tokens"]
    text = ask(app, "/detokenize", {"model": "pirate", "tokens": tokens}).json()["prompt"]
    assert "hi" in text and "assistant" in text


@pytest.mark.parametrize("text", ["hello cats", "Grüße, 猫", " a  b "])
def test_tokens_become_their_text_again(app, text):
    tokens = ask(app, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert ask(app, "/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    "path, body, status, param",
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "colour": "red"}, 400, "colour"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404, "model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(app, path, body, status, param):
    answer = ask(app, path, body)
    assert answer.status_code == status and error_of(answer)["param"] == param
