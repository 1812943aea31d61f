"""/v1/responses: OpenAI's Responses API over chats, asked by its own package."""

import json

import openai
import pytest

from mindlora.serving.server.responses import Response
from tests.support.chat_templates import CHATML, HERMES_TOOLS
from tests.support.scripted_engine import BASE, make_engine, started, write_adapter
from tests.support.served_apps import ask, error_of, live, make_app

pytest.importorskip("llguidance")

PATH = "/v1/responses"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER = {"type": "function", "name": "weather", "description": "tells", "parameters": CITY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEMPLATE = HERMES_TOOLS.replace(
    "'\\n' + message.content", "'\\n' + (message.reasoning_content or '') + message.content"
)


@pytest.fixture(scope="module")
def speakers(tmp_path_factory):
    """An engine with adapters that call a tool, and that think."""
    folder = tmp_path_factory.mktemp("speakers")
    write_adapter(folder, "caller", CALL)
    write_adapter(folder, "thinker", "<think>\nTwo.\n</think>\n\nThere are 2.")
    write_adapter(folder, "pirate", "Arr, ")
    with started(make_engine(str(folder), num_blocks=1024, seq_length=1024)) as engine:
        yield engine


@pytest.fixture
def app(speakers, tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE + "{#- </think> #}")
    return make_app(speakers, chat_template=str(tmp_path / "template.jinja"))


@pytest.fixture
def client(app):
    with live(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


def respond(app, **fields):
    return ask(app, PATH, {"model": BASE, "input": "hi", **fields})


def prompt_of(app, monkeypatch, **fields):
    """Returns the prompt that the engine gets for a request."""
    engine, prompts = app.state.context.engine, []
    submit = engine.submit

    def noting(prompt, *rest, **named):
        prompts.append(prompt)
        return submit(prompt, *rest, **named)

    monkeypatch.setattr(engine, "submit", noting)
    answer = respond(app, max_output_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    return engine.tokenizer.decode(prompts[0])


def test_the_answer_has_openais_form(app):
    content = respond(app, model="pirate", metadata={"a": "b"}, store=True).json()
    assert Response(**content) and content["id"].startswith("resp_")
    (item,) = content["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Arr, user\nhi", "annotations": [], "logprobs": []}]
    assert content["status"] == "completed" and content["metadata"] == {"a": "b"} and content["store"] is False
    assert content["usage"]["output_tokens"] > 0 and content["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    short = respond(app, max_output_tokens=2).json()
    assert short["status"] == "incomplete" and short["incomplete_details"] == {"reason": "max_output_tokens"}


def test_instructions_and_items_become_messages(app, monkeypatch):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": "no rain"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "message", "role": "assistant", "content": "No."},
        {"role": "user", "content": "Sure?"},
    ]
    prompt = prompt_of(app, monkeypatch, input=items, instructions="Be brief.")
    calls = CALL + CALL.replace('{"city": "Rome"}', "{}")
    turns = ["system\nBe brief.", "user\nrain?", f"assistant\nLook.Well{calls}", "tool\nno rain", "tool\nrain"]
    turns += ["assistant\nNo.", "user\nSure?"]
    assert prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"


def test_a_loop_of_tools_with_the_package(client):
    items = [{"role": "user", "content": "rain?"}]
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.responses.create(model="caller", input=items, **options)
    (call,) = answer.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})
    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "no rain"}]
    answer = client.responses.create(model="pirate", input=items, tools=[WEATHER], tool_choice="none")
    assert answer.output_text.startswith("Arr, ") and answer.usage.input_tokens > 300
    named = {"type": "function", "name": "weather"}
    options = {"tools": [WEATHER], "tool_choice": named, "reasoning": {"effort": "none"}}
    answer = client.responses.create(model=BASE, input="rain?", **options)
    assert json.loads(answer.output[0].arguments) == {"city": "Rome"}


def test_a_stream_tells_what_happens_to_each_item(client):
    with client.responses.stream(model="pirate", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Arr, user\nhi" and final.usage.input_tokens > 0
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_call_is_streamed_too(client):
    options = {"model": "caller", "input": "rain?", "tools": [WEATHER], "parallel_tool_calls": False}
    events = list(client.responses.create(stream=True, tool_choice="required", **options))
    text = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (call,) = events[-1].response.output
    assert json.loads(text) == json.loads(call.arguments) == {"city": "Rome"} and call.status == "completed"
    done = next(event for event in events if event.type == "response.output_item.done")
    assert done.item.arguments == call.arguments and done.output_index == 0


def test_a_thought_is_an_item_of_its_own(client):
    answer = client.responses.create(model="thinker", input="hi")
    thought, message = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Two.")
    assert message.content[0].text.startswith("There are 2.")
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    limit = answer.usage.output_tokens - 4
    events = list(client.responses.create(model="thinker", input="hi", max_output_tokens=limit, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Two."
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    assert events[-1].type == "response.incomplete"
    again = [{"role": "user", "content": "hi"}, *answer.output, {"role": "user", "content": "And dogs?"}]
    assert client.responses.create(model=BASE, input=again, reasoning={"effort": "none"}).output_text


def test_the_text_keeps_a_schema(client):
    form = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    answer = client.responses.create(model=BASE, input="Where?", text=form, reasoning={"effort": "none"})
    assert json.loads(answer.output_text) == {"city": "Rome"}


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"previous_response_id": "resp_1"}, "unsupported_field", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_field", "conversation"),
        ({"background": True}, "unsupported_field", "background"),
        ({"temprature": 1.0}, "unknown_field", "temprature"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "invalid_value", "input.0.type"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "missing_field", "input.0.arguments"),
        ({"input": [{"content": "hi"}]}, "missing_field", "input.0.role"),
        ({"input": []}, "invalid_value", "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "missing_field", "text.format.schema"),
        ({"reasoning": {"effort": "lots"}}, "invalid_value", "reasoning_effort"),
    ],
    ids=str,
)
def test_what_it_lacks_is_refused_by_name(app, fields, code, param):
    answer = respond(app, **fields)
    error = error_of(answer)
    assert answer.status_code == 400 and (error["code"], error["param"]) == (code, param)


def test_an_error_in_the_middle_of_a_stream_is_an_event(speakers, tmp_path):
    (tmp_path / "template.jinja").write_text(CHATML)
    app = make_app(speakers, chat_template=str(tmp_path / "template.jinja"))
    forward, failing = speakers.runner.forward, iter([None] * 4)

    def some_steps(parts):
        if next(failing, 1) is not None:
            raise RuntimeError("out of order")
        return forward(parts)

    speakers.runner.forward = some_steps
    try:
        answer = respond(app, stream=True)
    finally:
        speakers.runner.forward = forward
    last = json.loads(answer.text.strip().split("\n\n")[-1].split("data: ")[1])
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "engine_error"
