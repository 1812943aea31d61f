"""/metrics and the request log: what is counted, and what is not told."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mindlora.serving.server.metrics import Busiest
from tests.support.scripted_engine import BASE
from tests.support.served_apps import ask, chat, complete, make_app


def samples(app):
    """Returns the metrics as {(name, labels): value}, parsed as Prometheus does."""
    answer = ask(app, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    assert len(families) > 20 and all(family.documentation for family in families)
    return {
        (sample.name.removeprefix("mindlora_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_requests_tokens_and_times_are_counted(engine):
    app = make_app(engine)
    before = samples(app)
    complete(app, n=2)
    chat(app, model="pirate", stream=True)
    complete(app, model="nobody")
    complete(app, model="broken")
    found = samples(app)
    assert found["requests_total", "stop"] == 2 and found["requests_total", "model_not_found"] == 1
    assert found["requests_total", "adapter_refused"] == 1
    assert found["http_responses_total", "200"] == 3 and found["http_responses_total", "404"] == 1
    assert found["adapter_requests_total", BASE] == 1 and found["adapter_requests_total", "pirate"] == 1
    assert found["adapter_generated_tokens_total", BASE] == 16
    assert ("adapter_requests_total", "nobody") not in found
    assert found["time_to_first_token_seconds_count",] == 3
    generated = found["generated_tokens_total",] - before["generated_tokens_total",]
    assert found["time_between_tokens_seconds_count",] == generated - 3
    assert found["request_seconds_count",] == 4 and found["queue_seconds_count",] == 2
    assert found["cache_blocks",] == found["cache_blocks_free",] == 256 and found["requests_running",] == 0
    assert found["adapter_slots",] == 4 and found["adapters_registered",] == 3
    assert found["adapter_slots_used",] == 1 and found["adapter_slots_leased",] == 0
    assert found["adapter_slot_loads_total", "pirate"] == 1 and ("adapter_slot_loads_total", BASE) not in found
    assert found["adapter_failures_total", "memory"] >= 1 and found["adapter_loads_total", "slots"] >= 1


def test_the_number_of_labels_is_bounded():
    forgotten = []
    busiest = Busiest(2, forgotten.append)
    assert [busiest.label(name) for name in ("a", "b", "c")] == ["a", "b", "other"]
    for _ in range(20):
        busiest.label("b")
    # c takes a's place once it has clearly been used more, and a's series ends.
    labels = [busiest.label("c") for _ in range(15)]
    assert labels == ["other"] * 10 + ["c"] * 5 and forgotten == ["a"]
    assert busiest.label("a") == "other"


def test_no_counter_of_an_adapter_falls(engine):
    app = make_app(engine, adapter_labels=1)
    for model in (BASE, *["pirate"] * 12, BASE):
        complete(app, "x", model=model)
    found = samples(app)
    # The one label went from the base to the adapter, whose first eleven requests stay with the others.
    assert found["adapter_requests_total", "other"] == 12 and found["adapter_requests_total", "pirate"] == 1
    assert ("adapter_requests_total", BASE) not in found


@pytest.fixture
def log(tmp_path):
    return tmp_path / "requests.jsonl"


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_each_request_has_one_line(engine, log, tmp_path):
    (tmp_path / "keys").write_text("ann sk-ann\n")
    app = make_app(engine, request_log=str(log), api_key_file=str(tmp_path / "keys"))
    headers = {"Authorization": "Bearer sk-ann"}
    body = {"model": "pirate", "prompt": "my secret", "max_tokens": 40, "n": 2}
    answers = [
        ask(app, "/v1/completions", body, headers=headers),
        ask(app, "/v1/completions", {**body, "model": "a\nb"}, headers=headers),
        ask(app, "/v1/completions", body),
        ask(app, "/health"),
    ]
    found = lines(log)
    assert [line["id"] for line in found] == [answer.headers["x-request-id"] for answer in answers[:3]]
    first = found[0]
    assert (first["key"], first["model"], first["status"], first["reason"]) == ("ann", "pirate", 200, "stop")
    prompt = len(engine.tokenizer.encode("my secret"))
    assert first["choices"] == 2 and first["prompt_tokens"] == prompt
    assert first["generated_tokens"] == 2 * (len("Arr, ") + prompt + 1)
    assert 0 <= first["queue_seconds"] <= first["first_token_seconds"] <= first["seconds"]
    assert (found[1]["model"], found[1]["reason"], found[1]["status"]) == ("a\nb", "model_not_found", 404)
    assert (found[2]["reason"], found[2]["status"]) == ("invalid_api_key", 401) and "key" not in found[2]
    assert "secret" not in log.read_text() and "sk-ann" not in log.read_text()


def test_prompts_are_logged_only_if_they_are_wanted(engine, log):
    app = make_app(engine, request_log=str(log), log_prompts=True)
    complete(app, "my secret")
    chat(app, "my other secret")
    assert [line["prompt"] for line in lines(log)] == [["my secret"], [{"role": "user", "content": "my other secret"}]]


def test_a_streamed_answers_line_comes_at_its_end(engine, log):
    app = make_app(engine, request_log=str(log))
    complete(app, stream=True)
    assert lines(log)[0]["stream"] is True and lines(log)[0]["generated_tokens"] == 8
