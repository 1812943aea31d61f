"""What a model thinks in /v1/chat/completions: apart from the answer, switched off, and before a constrained answer."""

import json

import pytest
from tokenizers import AddedToken

from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.scripted_engine import BASE, make_engine, started, write_adapter
from tests.support.served_apps import CHAT, ask, chat, error_of, events, make_app

# As Qwen3's: the model begins its thought itself, unless it is told to do without.
QWEN3 = CHATML.replace(
    "message.content",
    "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content else '')"
    " + message.content",
).replace(
    "'<|im_start|>assistant\\n' }}",
    "'<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}",
)
# Like DeepSeek-R1's template: the prompt begins the thought, and nothing switches it off.
R1 = CHATML.replace("message.content", "message.content.split('</think>')[-1]").replace(
    "'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"
)
PLAIN = CHATML
SAID = "Two\n\ncats.\n</think>\n\nThere are 2."


@pytest.fixture(scope="module", params=["text", "tokens", "special tokens"])
def thinkers(request, tmp_path_factory):
    """An engine with adapters that think; the marks are text, tokens, or tokens that the tokenizer calls special."""
    tokenizer = chat_tokenizer(CHATML)
    if request.param != "text":
        special = request.param == "special tokens"
        tokenizer.add_tokens([AddedToken(mark, special=special) for mark in ("<think>", "</think>")], special)
    folder = tmp_path_factory.mktemp("thinkers")
    write_adapter(folder, "thinker", f"<think>\n{SAID}#")
    write_adapter(folder, "goes-on", f"{SAID}#")
    write_adapter(folder, "json", '<think>\nTwo\n</think>\n\n{"a": 2}')
    write_adapter(folder, "goes-on-json", 'Two\n</think>\n\n{"a": 2}')
    write_adapter(folder, "hasty-json", '{"a": 2}')
    write_adapter(folder, "hasty", "There are 2.#")
    with started(make_engine(str(folder), tokenizer=tokenizer, num_blocks=512)) as engine:
        yield engine


@pytest.fixture
def app(thinkers, tmp_path):
    """Returns a function that makes the app with a template."""

    def make(template):
        (tmp_path / "template.jinja").write_text(template)
        return make_app(thinkers, chat_template=str(tmp_path / "template.jinja"))

    return make


def message_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def prompt_of(app, **body):
    tokens = ask(app, "/tokenize", {"messages": [{"role": "user", "content": "hi"}], **body}).json()["tokens"]
    return ask(app, "/detokenize", {"tokens": tokens}).json()["prompt"]


@pytest.mark.parametrize("template, model", [(QWEN3, "thinker"), (R1, "goes-on")])
def test_the_thought_comes_apart_from_the_answer(app, template, model):
    fields = {"model": model, "stop": "#"}
    message = message_of(chat(app(template), **fields))
    assert message == {
        "role": "assistant",
        "content": "There are 2.",
        "reasoning_content": "Two\n\ncats.",
        "reasoning": "Two\n\ncats.",
    }
    deltas = [part["choices"][0]["delta"] for part in events(chat(app(template), stream=True, **fields).text)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two\n\ncats."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Two\n\ncats."
    assert "".join(delta.get("content") or "" for delta in deltas) == "There are 2."
    without = message_of(chat(app(template), include_reasoning=False, **fields))
    assert without == {"role": "assistant", "content": "There are 2."}


def test_an_answer_without_a_thought_and_a_thought_without_an_answer(app):
    assert message_of(chat(app(QWEN3), model="hasty", stop="#")) == {"role": "assistant", "content": "There are 2."}
    message = message_of(chat(app(QWEN3), model="thinker", stop="cats"))
    assert message["content"] is None and message["reasoning_content"].startswith("Two")
    back = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "hi"}]
    assert ask(app(QWEN3), CHAT, {"model": BASE, "messages": back, "max_tokens": 1}).status_code == 200


def test_a_template_without_thoughts_shows_all(app):
    message = message_of(chat(app(PLAIN), model="thinker", stop="#"))
    assert message == {"role": "assistant", "content": f"<think>\n{SAID}"}


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}], ids=str
)
def test_thoughts_can_be_switched_off(app, fields):
    """What the model says is then the answer, whatever it is: the thought has ended in the prompt."""
    message = message_of(chat(app(QWEN3), model="goes-on", stop="#", **fields))
    assert message == {"role": "assistant", "content": SAID}


def test_a_thought_that_the_template_begins_is_ended(app):
    prompts = [chat(app(R1), reasoning_effort=effort).json()["usage"]["prompt_tokens"] for effort in ("none", "low")]
    assert prompts[0] > prompts[1]
    assert message_of(chat(app(R1), model="goes-on", reasoning_effort="none", stop="#"))["content"] == SAID


def test_variables_reach_the_template(app):
    made = app(QWEN3)
    assert prompt_of(made, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert prompt_of(made, chat_template_kwargs={"reasoning_effort": "high", "unknown": 1}).endswith("assistant\nhigh")
    assert prompt_of(made, chat_template_kwargs=None).endswith("assistant\n")
    counts = [
        chat(made, max_tokens=1, reasoning_effort=effort).json()["usage"]["prompt_tokens"] for effort in ("low", None)
    ]
    assert counts[0] > counts[1]
    for name in ("tokenize", "chat_template", "messages", "add_generation_prompt"):
        answer = chat(made, chat_template_kwargs={name: "x"})
        assert answer.status_code == 400 and f"chat_template_kwargs has {name}" in error_of(answer)["message"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_of_earlier_turns_reach_the_template(app, name):
    turns = [{"role": "assistant", "content": "2", name: "Two cats."}, {"role": "user", "content": "And dogs?"}]
    assert "<think>\nTwo cats.\n</think>\n\n2" in prompt_of(app(QWEN3), messages=turns)


@pytest.mark.parametrize("template, model", [(QWEN3, "json"), (R1, "goes-on-json")])
def test_a_constrained_answer_may_be_thought_about_first(app, template, model):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    message = message_of(chat(app(template), model=model, response_format=form))
    assert json.loads(message["content"]) == {"a": 2} and message["reasoning_content"] == "Two"
    message = message_of(chat(app(QWEN3), model="hasty-json", response_format=form))
    assert json.loads(message["content"]) == {"a": 2} and "reasoning_content" not in message
    message = message_of(chat(app(template), model="json", guided_choice=["yes", "no"], reasoning_effort="none"))
    assert message["content"] in ("yes", "no") and "reasoning_content" not in message
