"""Tools in /v1/chat/completions: calls in answers and in deltas, as OpenAI has them; tools' answers in messages."""

import json

import openai
import pytest

from tests.support.chat_templates import CHATML, HERMES_TOOLS, LLAMA3, chat_tokenizer
from tests.support.scripted_engine import BASE, make_engine, started, write_adapter
from tests.support.served_apps import ask, chat, error_of, events, live, make_app

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name, schema=SCHEMA, **fields):
    return {"type": "function", "function": {"name": name, "description": "tells", "parameters": schema, **fields}}


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


WEATHER, TIME = tool("weather"), tool("time", NOTHING)
NAMED = {"type": "function", "function": {"name": "weather"}}
OBJECT = {"type": "json_object"}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
PARAMETERS = "tools.1.function.parameters"
ARGUMENTS = '{"city": "Rome", "days": 3}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA3_CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'


@pytest.fixture(scope="module")
def callers(tmp_path_factory):
    """An engine with adapters that call a tool in each format, one after some text."""
    folder = tmp_path_factory.mktemp("callers")
    write_adapter(folder, "hermes", HERMES_CALL)
    write_adapter(folder, "polite", "Let me see.\n" + HERMES_CALL)
    write_adapter(folder, "llama3", LLAMA3_CALL)
    with started(make_engine(str(folder), num_blocks=1024, seq_length=1024)) as engine:
        yield engine


@pytest.fixture(scope="module", params=["hermes", "llama3"])
def served(request, callers, tmp_path_factory):
    """The app with a chat template that shows tools, and the adapter that calls in its format."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text({"hermes": HERMES_TOOLS, "llama3": LLAMA3}[request.param])
    return make_app(callers, chat_template=str(path)), request.param


def checked(call, names=("weather",)):
    assert call["type"] == "function" and call["id"].startswith("call_") and call["function"]["name"] in names
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, SCHEMA if call["function"]["name"] == "weather" else NOTHING)
    return arguments


def joined(answer):
    """Returns the message that the chunks of a streamed answer add up to, and why it ended."""
    content, calls, reasons = "", [], []
    for chunk in events(answer.text):
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            reasons.append(choice["finish_reason"])
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({**call, "function": dict(call["function"])})
                else:
                    assert "id" not in call and "name" not in call["function"]
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert set(reasons[:-1]) <= {None}
    return content, calls, reasons[-1]


@pytest.mark.parametrize("choice", ["required", NAMED, "auto", None])
def test_a_call_has_arguments_of_its_schema(served, choice):
    app, adapter = served
    fields = {"model": adapter, "tools": [WEATHER, TIME], "max_tokens": 150, "parallel_tool_calls": False}
    fields |= {} if choice is None else {"tool_choice": choice}
    said = chat(app, **fields).json()["choices"][0]
    assert said["finish_reason"] == "tool_calls" and said["message"]["content"] is None
    (call,) = said["message"]["tool_calls"]
    assert checked(call) == json.loads(ARGUMENTS) and "index" not in call
    content, calls, reason = joined(chat(app, stream=True, **fields))
    assert (content, reason) == ("", "tool_calls") and checked(calls[0]) == json.loads(ARGUMENTS)


def test_whoever_would_say_something_else_must_call(served):
    app, _ = served
    for seed in range(3):
        fields = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        said = chat(app, max_tokens=200, **fields).json()["choices"][0]
        assert said["finish_reason"] == "tool_calls", said
        checked(said["message"]["tool_calls"][0], ("weather", "time"))
        named = chat(app, max_tokens=200, **{**fields, "tool_choice": NAMED}).json()["choices"][0]
        checked(named["message"]["tool_calls"][0])


def test_without_a_need_to_call_the_answer_is_text(served):
    app, _ = served
    for choice in ("none", "auto"):
        said = chat(app, tools=[WEATHER], tool_choice=choice, max_tokens=8).json()["choices"][0]
        assert said["message"]["content"] and "tool_calls" not in said["message"]
        assert said["finish_reason"] == "length"


def test_text_may_come_before_a_call(callers, tmp_path):
    (tmp_path / "t").write_text(HERMES_TOOLS)
    app = make_app(callers, chat_template=str(tmp_path / "t"))
    fields = {"model": "polite", "tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 200}
    message = chat(app, **fields).json()["choices"][0]["message"]
    assert message["content"].strip() == "Let me see." and checked(message["tool_calls"][0])
    content, calls, reason = joined(chat(app, stream=True, **fields))
    assert content.strip() == "Let me see." and checked(calls[0]) and reason == "tool_calls"


def test_a_call_that_is_cut_off_is_no_call_to_carry_out(served):
    app, adapter = served
    said = chat(app, model=adapter, tools=[WEATHER], tool_choice="required", max_tokens=60).json()["choices"][0]
    assert said["finish_reason"] in ("length", "tool_calls")
    short = chat(app, model=adapter, tools=[WEATHER], tool_choice="required", max_tokens=2).json()["choices"][0]
    assert short["finish_reason"] == "length"


def test_a_call_of_any_length_shows_nothing_of_what_is_around_its_arguments(served):
    app, adapter = served
    fields = {"model": adapter, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = chat(app, max_tokens=150, **fields).json()
    for cut in range(1, whole["usage"]["completion_tokens"] + 1):
        said = chat(app, max_tokens=cut, **fields).json()["choices"][0]
        shown = said["message"].get("tool_calls", [{"function": {"arguments": ""}}])[0]["function"]["arguments"]
        assert not said["message"]["content"] and ARGUMENTS.startswith(shown), cut
        assert said["finish_reason"] == "length" or shown == ARGUMENTS
    assert said["finish_reason"] == "tool_calls"


def test_a_tool_without_parameters_has_no_arguments(served):
    app, _ = served
    bare = {"type": "function", "function": {"name": "time"}}
    said = chat(app, tools=[bare], tool_choice="required", parallel_tool_calls=False, max_tokens=200).json()["choices"][
        0
    ]
    assert json.loads(said["message"]["tool_calls"][0]["function"]["arguments"]) == {}


def test_beside_a_constraint_the_answer_is_a_call_or_what_the_constraint_says(served):
    app, adapter = served
    form = {"type": "json_schema", "json_schema": {"name": "day", "schema": {"enum": ["Monday <tool_call>", "{}"]}}}
    for said in ({"response_format": form}, {"guided_choice": ['"Monday <tool_call>"', '"{}"']}):
        fields = {"tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 200, **said}
        called = chat(app, model=adapter, **fields).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls" and checked(called["message"]["tool_calls"][0])
        answered = chat(app, logit_bias=never_a_call(app), **fields).json()["choices"][0]
        assert answered["finish_reason"] == "stop" and json.loads(answered["message"]["content"]) in (
            "Monday <tool_call>",
            "{}",
        )
        for choice in ("required", NAMED):
            must = chat(app, tool_choice=choice, **fields).json()["choices"][0]
            assert must["finish_reason"] == "tool_calls"
        content, calls, reason = joined(chat(app, stream=True, logit_bias=never_a_call(app), **fields))
        assert json.loads(content) and not calls and reason == "stop"


def never_a_call(app):
    """Returns a logit_bias against the tokens with which calls begin in both forms."""
    tokens = [ask(app, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"][0] for text in "{<"]
    return dict.fromkeys(map(str, tokens), -100)


def test_the_answer_may_call_the_allowed_tools_alone(served):
    app, adapter = served
    fields = {"model": adapter, "tools": [WEATHER, TIME], "parallel_tool_calls": False, "max_tokens": 200}
    for names in (["time"], ["weather"], ["time", "weather"]):
        said = chat(app, tool_choice=allowed("required", *names), **fields).json()["choices"][0]
        (call,) = said["message"]["tool_calls"]
        checked(call, names)
    said = chat(app, tool_choice=allowed("auto", "weather"), **fields).json()["choices"][0]
    assert checked(said["message"]["tool_calls"][0]) == json.loads(ARGUMENTS)


LOOSE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^(?=R)R[a-z]+$", "format": "city"},
        "days": {"type": "integer", "not": {"const": 7}},
        "pattern": {"const": {"pattern": "(?=a)"}},
    },
    "patternProperties": {"^(?!x)": {"type": "null"}},
    "propertyNames": {"maxLength": 9},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_keywords_that_cannot_be_enforced_are_left_out_of_tools_and_named(served):
    app, adapter = served
    fields = {"model": adapter, "tools": [TIME, tool("weather", LOOSE)], "max_tokens": 200}
    for stream in (False, True):
        answer = chat(app, stream=stream, **fields)
        assert answer.status_code == 200
        said = answer.headers["X-Not-Enforced"]
        assert said.count(PARAMETERS) == 5 and "tools.0" not in said
        for word in ("Unusable pattern: ^(?=R)R[a-z]+$", "^(?!x)", "propertyNames", '"not"', "Unknown format: city"):
            assert word in said
    _, calls, _ = joined(answer)
    assert json.loads(calls[0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert "X-Not-Enforced" not in chat(app, tools=[WEATHER], max_tokens=4).headers


def test_marks_of_calls_may_be_special_tokens(tmp_path):
    marks = {"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"]}
    write_adapter(tmp_path, "polite", "Let me see.\n" + HERMES_CALL)
    tokenizer = chat_tokenizer(HERMES_TOOLS, **marks)
    with started(make_engine(str(tmp_path), num_blocks=1024, seq_length=1024, tokenizer=tokenizer)) as engine:
        fields = {"model": "polite", "tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 200}
        said = chat(make_app(engine), **fields).json()["choices"][0]
    assert said["message"]["content"].strip() == "Let me see." and said["finish_reason"] == "tool_calls"
    assert checked(said["message"]["tool_calls"][0]) == json.loads(ARGUMENTS)


def test_the_openai_package_calls_a_tool_and_sends_its_answer(served):
    app, adapter = served
    with live(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        messages = [{"role": "user", "content": "rain?"}]
        options = {"model": adapter, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        answer = client.chat.completions.create(messages=messages, max_tokens=150, **options).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
        messages += [answer.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "no rain"}]
        assert client.chat.completions.create(model=BASE, messages=messages, tools=[WEATHER], tool_choice="none")
        tokens = ask(app, "/tokenize", {"messages": messages, "tools": [WEATHER]}).json()["tokens"]
        prompt = ask(app, "/detokenize", {"tokens": tokens}).json()["prompt"]
        assert all(text in prompt for text in ("tells", '"city": "Rome", "days": 3}', "no rain"))
        with client.chat.completions.stream(messages=messages[:1], max_tokens=150, **options) as stream:
            final = stream.get_final_completion().choices[0]
        assert json.loads(final.message.tool_calls[0].function.arguments) == json.loads(ARGUMENTS)


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"tools": [WEATHER, WEATHER]}, "tools", "Two of the tools have the name 'weather'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools: give some"),
        (
            {"tools": [TIME], "tool_choice": NAMED},
            "tool_choice",
            "names 'weather', which is none of the tools (time): give",
        ),
        ({"tool_choice": allowed("auto", "weather"), "tools": [TIME]}, "tool_choice", "names 'weather', which is none"),
        (
            {"tools": [TIME, tool("weather", {"type": "strange"})]},
            PARAMETERS,
            "cannot be used: Invalid type: strange. ",
        ),
        ({"tools": [TIME, tool("weather", UNIQUE, strict=True)]}, PARAMETERS, 'Unimplemented keys: ["uniqueItems"]. '),
        ({"tools": [WEATHER], "response_format": OBJECT, "guided_regex": "a"}, "response_format", "both say"),
        ({"tools": [{**WEATHER, "cache": 1}]}, "tools.0.cache", "is not a field of this request"),
    ],
)
def test_what_cannot_be_kept_is_refused(served, fields, param, message):
    answer = chat(served[0], **fields)
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == param and message in error["message"]


def test_arguments_that_are_no_json_are_refused(served):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{"}}
    turns = [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = ask(served[0], "/v1/chat/completions", {"model": BASE, "messages": turns})
    assert answer.status_code == 400 and "its arguments as JSON in a string" in error_of(answer)["message"]


def test_a_template_without_tools_refuses_them(callers, tmp_path):
    (tmp_path / "t").write_text(CHATML)
    answer = chat(make_app(callers, chat_template=str(tmp_path / "t")), tools=[WEATHER])
    assert answer.status_code == 400 and "needs a chat template that shows tools" in error_of(answer)["message"]
