"""/v1/chat/completions: conversations through the chat template, and the form of answers."""

import pytest

from mindlora.serving.server import schemas
from tests.support.scripted_engine import BASE
from tests.support.served_apps import CHAT, ask, chat, events, make_app

# What the base repeats of a chat's prompt: special tokens have no text, and the turn's end does not end the answer,
# because the scripted engine is not asked to stop there.
HI = "user\nhi"


@pytest.fixture
def app(engine):
    return make_app(engine)


def test_the_answer_has_openais_form(app):
    content = chat(app).json()
    assert schemas.ChatCompletion(**content) and content["id"].startswith("chatcmpl-")
    choice = content["choices"][0]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": HI},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert content["object"] == "chat.completion" and content["model"] == BASE


def test_the_prompt_is_what_the_chat_template_makes(app, engine):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "ho", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "hi"},
    ]
    content = ask(app, CHAT, {"model": BASE, "messages": messages, "max_tokens": 3}).json()
    rendered = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "hi"},
    ]
    expected = engine.tokenizer.apply_chat_template(rendered, add_generation_prompt=True, return_dict=False)
    assert content["usage"]["prompt_tokens"] == len(expected)


def test_an_answer_ends_where_the_template_ends_a_turn(app):
    assert chat(app).json()["choices"][0]["message"]["content"] == HI
    on = chat(app, ignore_eos=True, max_tokens=40).json()["choices"][0]
    assert on["message"]["content"].startswith(f"{HI}\nassistant\n") and on["finish_reason"] == "length"


def test_an_answer_may_fill_the_window(app, engine):
    content = chat(app, ignore_eos=True).json()
    assert content["usage"]["total_tokens"] == engine.seq_length
    assert content["choices"][0]["finish_reason"] == "length"


def test_max_tokens_has_two_names(app):
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat(app, **{name: 2}).json()["usage"]["completion_tokens"] == 2


def test_logprobs(app):
    choice = chat(app, model="pirate", logprobs=True, top_logprobs=2, max_tokens=3).json()["choices"][0]
    entries = schemas.ChatLogprobs(**choice["logprobs"]).content
    assert [(entry.token, entry.bytes) for entry in entries] == [("A", [65]), ("r", [114]), ("r", [114])]
    assert all(entry.logprob == 0.0 and len(entry.top_logprobs) == 2 for entry in entries)
    assert entries[0].top_logprobs[0].token == "A" and entries[0].top_logprobs[1].logprob == -50.0
    assert chat(app, logprobs=True, max_tokens=1).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_bytes_of_tokens_make_the_text_within_a_character_too(app):
    choice = chat(app, "é😀温", logprobs=True, top_logprobs=3, max_tokens=40).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert (
        b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"] == "user\né😀温"
    )
    parts = [entry for entry in entries if entry["token"].startswith("bytes:")]
    assert [entry["token"] for entry in parts[:2]] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert all("\ufffd" not in entry["token"] for entry in entries) and len(parts) == 9


def test_a_streamed_answer_says_the_same_in_pieces(app):
    fields = {"model": "formal", "n": 2, "stream_options": {"include_usage": True}, "stream": True}
    chunks = events(chat(app, **fields).text)
    assert all(schemas.ChatCompletion(**chunk) for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and chunks[-1]["choices"] == []
    for index in range(2):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in parts) == f"Dear Sir, {HI}"
        assert parts[-1]["finish_reason"] == "stop"


def test_a_template_can_be_given(engine, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}{{ message.content | upper }}{% endfor %}")
    answer = chat(make_app(engine, chat_template=str(path)), "dogs")
    assert answer.json()["choices"][0]["message"]["content"] == "DOGS"
    instruction = chat(make_app(engine, template="plain"), "dogs", max_tokens=60).json()
    assert "dogs" in instruction["choices"][0]["message"]["content"]
