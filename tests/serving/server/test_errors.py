"""What cannot be answered: the status, and OpenAI's error object with a message that says what to do."""

import json
import threading
import time

import pytest

from mindlora.core.errors import BackendError
from mindlora.serving.server.schemas import ChatRequest
from tests.support.scripted_engine import BASE, SEQ_LENGTH, make_engine, started, write_adapter
from tests.support.served_apps import CHAT, ask, chat, complete, error_of, events, make_app, until


@pytest.fixture
def app(engine):
    return make_app(engine)


def refused(answer, status, code, param=None):
    """Returns the message of an error, its status, type, code and field checked."""
    assert answer.status_code == status, answer.text
    error = error_of(answer)
    assert (error["code"], error["param"]) == (code, param)
    return error["message"]


def test_an_unknown_adapter_is_not_the_base(app):
    for answer in (complete(app, model="pirat"), chat(app, model="pirat"), complete(app, model="pirat", stream=True)):
        message = refused(answer, 404, "model_not_found", "model")
        assert "'pirat'" in message and "'pirate'" in message
    for name in ("../pirate", "pirate/", ".", "", "/etc", "pirate\0"):
        refused(complete(app, model=name), 404, "model_not_found", "model")


def test_a_damaged_adapter_fails_alone_and_says_why(app):
    whole, streamed = complete(app, model="broken"), complete(app, model="broken", stream=True)
    for answer in (whole, streamed):
        message = refused(answer, 400, "adapter_refused", "model")
        assert message == "broken holds no tensors: copy the adapter again."
    assert complete(app, model="pirate").status_code == 200


ASKED_FOR = {
    "functions": [{"name": "f"}],
    "best_of": 2,
    "audio": {"voice": "alloy"},
    "modalities": ["text", "audio"],
    "truncate_prompt_tokens": 3,
    "use_beam_search": True,
    "prompt_logprobs": 1,
}


@pytest.mark.parametrize("field", ASKED_FOR)
def test_what_is_not_supported_is_refused_by_name(app, field):
    assert field in refused(chat(app, **{field: ASKED_FOR[field]}), 400, "unsupported_field", field)


def test_fields_that_ask_for_nothing_are_taken(app):
    neutral = {name: values[0] for name, values in ChatRequest.unsupported.items() if values}
    nothing = dict.fromkeys(ChatRequest.unsupported)
    notes = {"user": "ann", "metadata": {"a": "b"}}
    for given in (neutral, nothing, notes):
        assert chat(app, **given).status_code == 200
    assert complete(app, suffix="", best_of=1, logit_bias={}, n=None, stop=None, seed=None).status_code == 200


def test_unknown_fields_are_refused_by_name_outside_of_messages(app):
    refused(complete(app, temprature=1.0), 400, "unknown_field", "temprature")
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    refused(chat(app, **options), 400, "unsupported_field", "stream_options.continuous_usage_stats")
    options = {"response_format": {"type": "text", "kind": 1}}
    refused(chat(app, **options), 400, "unknown_field", "response_format.kind")


def test_a_null_asks_for_nothing_whatever_its_name(app):
    options = {"stream": True, "stream_options": {"include_usage": True, "every": None}}
    for answer in (complete(app, temprature=None), chat(app, frobnicate=None, **options)):
        assert answer.status_code == 200


def test_what_another_server_put_into_a_message_passes(app):
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "arguments": "{}", "color": 1}
    call = {"id": "1", "type": "function", "function": function, "provider_specific_fields": {"a": 1}}
    answer = {"role": "assistant", "content": "x", "tool_calls": [call], "annotations": [], "refusal": None}
    answer |= {"provider_specific_fields": {"refusal": None}, "reasoning": {"effort": 1}, "stop_reason": None}
    messages = [{"role": "user", "content": [part], "nmae": None}, answer, {"role": "assistant", "content": None}]
    assert chat(app, messages=[*messages, {"role": "user", "content": "hi"}]).status_code == 200
    for field, value in {"audio": {"id": "1"}, "function_call": {"name": "f"}, "refusal": "No."}.items():
        said = {"role": "assistant", "content": "x", field: value}
        refused(chat(app, messages=[said]), 400, "unsupported_field", f"messages.0.{field}")


@pytest.mark.parametrize(
    "given, param",
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"50": 101}}, "logit_bias"),
        ({"logit_bias": {"fifty": 1}}, "logit_bias.fifty"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": "\ud83d"}, "prompt"),
        ({"model": 5}, "model"),
    ],
)
def test_values_out_of_range_are_refused_by_name(app, given, param):
    body = json.dumps({"model": BASE, "prompt": "x", **given})
    answer = ask(app, "/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert refused(answer, 400, "invalid_value", param).startswith(f"{param} is not what it should be: ")


def test_fields_that_contradict_each_other_are_refused(app):
    assert "set echo and logprobs too" in refused(complete(app, max_tokens=0), 400, "invalid_value", "max_tokens")
    refused(complete(app, max_tokens=0, echo=True), 400, "invalid_value", "max_tokens")
    assert "at least two" in refused(complete(app, [5], max_tokens=0, echo=True, logprobs=0), 400, "invalid_value")
    refused(complete(app, stream_options={"include_usage": True}), 400, "invalid_value", "stream_options")
    refused(chat(app, top_logprobs=1), 400, "invalid_value", "top_logprobs")
    refused(chat(app, max_tokens=1, max_completion_tokens=2), 400, "invalid_value", "max_tokens")


def test_missing_fields_are_named(app):
    refused(ask(app, "/v1/completions", {"model": BASE}), 400, "missing_field", "prompt")
    refused(ask(app, CHAT, {"messages": [{"content": "x"}], "model": BASE}), 400, "missing_field", "messages.0.role")


def test_messages_that_do_not_fit_the_template_are_refused(app):
    refused(chat(app, messages=[]), 400, "invalid_value", "messages")
    refused(chat(app, messages=[{"role": "clerk", "content": "x"}]), 400, "invalid_value", "messages.0.role")
    assert "no content" in refused(chat(app, messages=[{"role": "user", "content": None}]), 400, "invalid_value")


def test_tokens_that_the_model_does_not_know_are_refused(app):
    for given in ({}, {"echo": True}):
        assert "token 99999" in refused(complete(app, [1, 99999], **given), 400, "invalid_value")
    assert "logit_bias names token 99999" in refused(complete(app, logit_bias={"99999": 1}), 400, "invalid_value")


def test_a_prompt_that_is_too_long_is_refused_with_numbers(app, engine):
    message = refused(complete(app, "x" * 300), 400, "context_length_exceeded", "prompt")
    assert str(SEQ_LENGTH) in message and "301" in message
    refused(complete(app, "x", max_tokens=SEQ_LENGTH - 1), 400, "context_length_exceeded", "prompt")
    limited = make_app(engine, max_prompt_tokens=5, max_output_tokens=9)
    assert "7 tokens" in refused(complete(limited), 400, "context_length_exceeded", "prompt")
    assert "9" in refused(complete(limited, "x", max_tokens=10), 400, "invalid_value", "max_tokens")
    assert complete(limited, "x", max_tokens=None, ignore_eos=True).json()["usage"]["completion_tokens"] == 9
    assert chat(make_app(engine, max_output_tokens=9), ignore_eos=True).json()["usage"]["completion_tokens"] == 9
    refused(complete(app, "", add_special_tokens=False), 400, "invalid_value", "prompt")


def test_the_number_of_answers_is_bounded(engine):
    app = make_app(engine, max_choices=5)
    assert complete(app, ["a", "b"], n=2).status_code == 200
    refused(complete(app, ["a", "b"], n=3), 400, "invalid_value", "n")
    refused(chat(app, n=10**9), 400, "invalid_value", "n")


@pytest.mark.parametrize(
    "content, kind, code",
    [
        (b"{", "application/json", "invalid_json"),
        (b"", "application/json", "missing_field"),
        (b"[]", "application/json", "invalid_body"),
        (b"\xff\xfe{", "application/json", "invalid_body"),
        (b"[" * 100_000, "application/json", "invalid_body"),
        (b'{"n": ' + b"9" * 5000 + b"}", "application/json", "invalid_body"),
        # A page of another site can send this without asking; JSON it cannot.
        (b'{"model": "tiny-base", "prompt": "x"}', "text/plain", "invalid_body"),
        (b"prompt=x", "application/x-www-form-urlencoded", "invalid_body"),
    ],
)
def test_a_body_that_is_not_json_is_refused(app, content, kind, code):
    refused(ask(app, "/v1/completions", content=content, headers={"Content-Type": kind}), 400, code)


def test_paths_and_methods_that_do_not_exist_have_errors_of_the_same_form(app):
    refused(ask(app, "/v1/rerank", {}), 404, "not_found")
    refused(ask(app, "/v1/completions"), 405, "method_not_allowed")


def test_a_full_queue_says_when_to_come_again(tmp_path):
    write_adapter(tmp_path, "pirate")
    with started(make_engine(str(tmp_path), max_running=1, max_waiting=2)) as engine:
        app = make_app(engine)
        engine.runner.going.clear()
        held = [engine.submit([1, 2], sampling, None) for sampling in [_sampling()]]
        until(lambda: engine.snapshot().running == 1)
        held += [engine.submit([1, 2], _sampling(), None) for _ in range(2)]
        for stream in (False, True):
            answer = complete(app, stream=stream)
            assert "max_waiting" in refused(answer, 429, "queue_full") and answer.headers["Retry-After"] == "1"
        # Where there are several prompts, the first ones do not stay behind.
        held[-1].cancel()
        refused(complete(app, ["a", "b", "c"]), 429, "queue_full")
        assert engine.snapshot().waiting == 1
        engine.runner.going.set()
        assert complete(app).status_code == 200


def _sampling():
    from mindlora.serving.request import Sampling

    return Sampling(max_tokens=4)


def test_answers_that_are_still_to_begin_when_the_engine_stops_are_told_so(tmp_path):
    with started(make_engine()) as engine:
        app, forward = make_app(engine), engine.runner.forward

        def last_step(parts):
            app.state.context.draining = True
            threading.Thread(target=engine.stop, kwargs={"grace": 1.0}).start()
            until(lambda: not engine.alive)
            return forward(parts)

        engine.runner.forward = last_step
        answer = complete(app, n=3)
        assert refused(answer, 503, "shutting_down") and answer.headers["Retry-After"] == "10"


def test_a_failed_step_is_the_servers_fault(app, engine):
    engine.runner.error = BackendError("out of order")
    answer = complete(app)
    assert "out of order" in refused(answer, 500, "engine_error") and error_of(answer)["type"] == "server_error"
    engine.runner.error = None
    assert complete(app).status_code == 200


def test_an_error_that_nobody_foresaw_tells_the_log_and_not_the_client(app, engine, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("secret path")

    monkeypatch.setattr(engine, "submit", broken)
    assert "secret" not in refused(complete(app), 500, "internal_error")
    assert "secret path" in caplog.text
    monkeypatch.undo()
    assert complete(app).status_code == 200


def test_an_error_in_the_middle_of_a_stream_is_an_event(app, engine):
    engine.runner.delay = 0.005
    failing = iter([None] * 4)
    forward = engine.runner.forward

    def some_steps(parts):
        if next(failing, 1) is not None:
            raise BackendError("out of order")
        return forward(parts)

    engine.runner.forward = some_steps
    try:
        answer = complete(app, stream=True)
    finally:
        engine.runner.forward = forward
    chunks = events(answer.text)
    assert answer.status_code == 200 and chunks[0]["choices"][0]["index"] == 0
    assert "out of order" in chunks[-1]["error"]["message"] and chunks[-1]["error"]["code"] == "engine_error"
    assert engine.snapshot().blocks_free == engine.snapshot().blocks_total


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(engine, stream):
    app = make_app(engine, request_seconds=0.1)
    engine.runner.going.clear()
    begin = time.monotonic()
    refused(complete(app, stream=stream), 504, "timeout")
    assert 0.1 <= time.monotonic() - begin < 5
    engine.runner.going.set()
    until(lambda: engine.snapshot().blocks_free == engine.snapshot().blocks_total)
    assert complete(app).status_code == 200
