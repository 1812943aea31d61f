"""Any body gets an answer that the description of the API foresees; none is the server's fault."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindlora.serving.server import responses, schemas, texts
from tests.support.chat_templates import HERMES_TOOLS
from tests.support.scripted_engine import BASE
from tests.support.served_apps import CHAT, ask, error_of, events, make_app

BODIES = {
    "/v1/completions": (schemas.CompletionRequest, {"model": BASE, "prompt": "x", "max_tokens": 4}),
    CHAT: (schemas.ChatRequest, {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
    "/v1/responses": (responses.ResponsesRequest, {"model": BASE, "input": "x", "max_output_tokens": 4}),
    "/v1/embeddings": (texts.EmbeddingRequest, {"model": BASE, "input": "x"}),
    "/v1/score": (texts.ScoreRequest, {"model": BASE, "text_1": "x", "text_2": "y"}),
    "/v1/classify": (texts.ClassifyRequest, {"model": BASE, "input": "x"}),
    "/tokenize": (schemas.TokenizeRequest, {"model": BASE, "prompt": "x"}),
    "/detokenize": (schemas.DetokenizeRequest, {"model": BASE, "tokens": [1]}),
    "/v1/load_lora_adapter": (schemas.LoadAdapterRequest, {"lora_name": "a", "lora_path": "pirate"}),
    "/v1/unload_lora_adapter": (schemas.UnloadAdapterRequest, {"lora_name": "a"}),
}
NUMBERS = st.one_of(st.integers(-2, 40), st.integers(), st.floats(), st.sampled_from([2**31, 2**63, 10**30, 1e308]))
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["", "\0", "\ud800", "../x", "user", BASE, "pirate", "<s>"]))
SIMPLE = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXTS | st.sampled_from(["type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def fitting(schema, parts):
    """Returns a strategy for values that a JSON schema describes, more or less."""
    if "$ref" in schema:
        schema = parts[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return st.one_of([fitting(kind, parts) for kind in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind is None:
        return VALUES
    if kind == "string" and "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    if kind == "array":
        return st.lists(fitting(schema["items"], parts), min_size=schema.get("minItems", 0), max_size=3)
    if "patternProperties" in schema:
        ((keys, values),) = schema["patternProperties"].items()
        return st.dictionaries(st.from_regex(keys, fullmatch=True), fitting(values, parts), max_size=3)
    if kind == "object" and "properties" not in schema:
        return st.dictionaries(TEXTS, VALUES, max_size=3)
    if kind == "object":
        fields = {name: fitting(field, parts) for name, field in schema["properties"].items()}
        needed = {name: field for name, field in fields.items() if name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional={name: fields[name] for name in fields.keys() - needed})
    least, most = schema.get("minimum", 0.125), schema.get("maximum", 2)
    simple = {
        "integer": st.integers(schema.get("minimum", -3), min(most, 20) if "maximum" in schema else 3),
        "number": st.floats(least, min(most, 2)),
        "boolean": st.booleans(),
        "string": st.text(min_size=schema.get("minLength", 0), max_size=12),
        "null": st.none(),
    }
    return simple[kind]


@pytest.fixture(scope="module")
def app(running, tmp_path_factory):
    # One that shows tools.
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(HERMES_TOOLS)
    limits = {"max_body_bytes": 4000, "max_choices": 6}
    return make_app(running, allow_runtime_loading=True, chat_template=str(template), **limits)


def check(app, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    answer = ask(app, path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert error_of(answer)["message"]
    elif path in (CHAT, "/v1/completions"):
        streamed = answer.headers["content-type"].startswith("text/event-stream")
        chunks = events(answer.text) if streamed else [answer.json()]
        assert not any("error" in chunk for chunk in chunks)


LIMITED = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", BODIES)
@LIMITED
@given(data=st.data())
def test_bodies_that_nearly_fit(app, path, data):
    model, good = BODIES[path]
    schema = model.model_json_schema()
    body = {**good, **data.draw(fitting(schema, schema.get("$defs", {})))}
    # A name that exists, in most of them; and in half of them a field or two that may be anything.
    names = {name: data.draw(st.sampled_from([good[name]] * 9 + [body[name]])) for name in ("model",) if name in body}
    changes = data.draw(st.dictionaries(st.sampled_from([*body, "tools", "what"]), VALUES, max_size=2))
    check(app, path, {**body, **names, **(changes if data.draw(st.booleans()) else {})})


@LIMITED
@given(body=VALUES | st.binary(max_size=60))
def test_bodies_of_any_kind(app, body):
    for path in BODIES:
        check(app, path, body)


def test_the_description_names_every_path_and_body(app):
    described = ask(app, "/openapi.json").json()
    assert set(BODIES) < set(described["paths"]) and "/metrics" in described["paths"]
    for path, (model, _) in BODIES.items():
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith(model.__name__)
