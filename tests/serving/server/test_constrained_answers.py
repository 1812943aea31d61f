"""Answers that are JSON of a schema, match a regex, are one of several texts or follow a grammar; over HTTP."""

import json
import re

import pytest

from tests.support.scripted_engine import make_engine, started
from tests.support.served_apps import chat, complete, error_of, events, make_app

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def is_pet(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FIELDS = [
    ({"response_format": OPENAI}, is_pet),
    ({"guided_json": SCHEMA}, is_pet),
    ({"guided_json": json.dumps(SCHEMA)}, is_pet),
    ({"structured_outputs": {"json": SCHEMA}}, is_pet),
    ({"guided_regex": "[0-9]{2}-[a-c]"}, lambda text: re.fullmatch("[0-9]{2}-[a-c]", text)),
    ({"structured_outputs": {"regex": "[0-9]{2}"}}, lambda text: re.fullmatch("[0-9]{2}", text)),
    ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ({"structured_outputs": {"choice": ["yes"]}}, lambda text: text == "yes"),
    ({"guided_grammar": 'root ::= "a" "b"? "c"'}, lambda text: text in ("abc", "ac")),
    ({"structured_outputs": {"grammar": 'start: "a" "b"? "c"'}}, lambda text: text in ("abc", "ac")),
]


@pytest.fixture
def app(engine):
    return make_app(engine)


@pytest.mark.parametrize("fields, is_right", FIELDS)
def test_answers_are_what_the_field_says(app, fields, is_right):
    for adapter in ("tiny-base", "pirate"):
        choices = complete(app, model=adapter, max_tokens=200, n=2, **fields).json()["choices"]
        assert all(choice["finish_reason"] == "stop" and is_right(choice["text"]) for choice in choices)
    said = chat(app, **fields).json()["choices"][0]
    assert said["finish_reason"] == "stop" and is_right(said["message"]["content"])
    chunks = events(chat(app, stream=True, **fields).text)
    assert is_right("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(app, fields):
    # Drawn at random, an object need not end within the window: its beginning tells.
    texts = [choice["text"] for choice in complete(app, n=8, seed=1, **fields).json()["choices"]]
    assert all(text.startswith("{") for text in texts)


def test_a_seed_gives_the_same_constrained_answer_and_logprobs_come_with_it(app):
    fields = {"seed": 5, "logprobs": 1, "max_tokens": 200, "response_format": OPENAI}
    first, again = (complete(app, **fields).json()["choices"][0] for _ in range(2))
    assert first == again and "".join(first["logprobs"]["tokens"][:-1]) == first["text"]


def test_stop_texts_and_max_tokens_end_a_constrained_answer_early(app):
    stopped = complete(app, guided_regex="abc-def", stop="-d").json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("abc", "stop")
    cut = complete(app, guided_regex="abc-def", max_tokens=2).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("ab", "length")


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}}, "guided_json", "minimum"),
        ({"guided_json": "{"}, "guided_json", "EOF"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar", "no answer can meet it"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "leave one of them out"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "not a field"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"guided_regex": "a", "ignore_eos": True}, None, "ignore_eos"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(app, fields, param, words):
    answer = complete(app, **fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == param
    assert words in error_of(answer)["message"]


def test_fields_that_ask_for_no_constraint_are_taken(app):
    free = complete(app, seed=1).json()["choices"]
    for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}):
        assert complete(app, seed=1, **fields).json()["choices"] == free


def test_a_server_without_the_library_says_so(app, monkeypatch):
    monkeypatch.setattr("mindlora.serving.constraints.llguidance", None)
    answer = complete(app, guided_regex="a")
    assert answer.status_code == 400 and "llguidance" in error_of(answer)["message"]
    assert complete(app).status_code == 200


def test_a_request_that_loses_its_blocks_keeps_its_constraint(adapters):
    fields = {"guided_regex": "[a-z]{40}", "max_tokens": 60, "seed": 3}
    with started(make_engine(str(adapters), num_blocks=24, max_running=4)) as engine:
        app = make_app(engine)
        answers = complete(app, n=4, **fields).json()["choices"]
        assert engine.snapshot().preemptions > 0
        assert all(re.fullmatch("[a-z]{40}", choice["text"]) for choice in answers)
        assert complete(app, **fields).json()["choices"][0]["text"] == answers[0]["text"]
