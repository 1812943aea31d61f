"""Tools: functions as tools, the calls in a turn, and the tokens that go on behind it."""

import json

import pytest

from mindlora.core.errors import ConfigError, RewardError
from mindlora.training.rl.reward_functions import shown_tool
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.settings import rl_settings
from mindlora.training.rl.tools import Tools
from tests.support.chat_templates import CHATML, HERMES_TOOLS, LLAMA3, chat_tokenizer
from tests.support.refusals import part, refused

FILE = '''
import time

def add(a: int, b: int = 2) -> int:
    """
    Adds.

    Args:
        a: One number.
        b: Another one.
    """
    return a + b

async def later(text: str):
    """
    Answers.

    Args:
        text: What is said.
    """
    if text == "sleep":
        time.sleep(60)
    return {"said": text}

def untold(a):
    return a

def rate(completions, **columns):
    return [1.0] * len(completions)
'''


def tool(name):
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": {"type": "object"}}}


def settings(*tools, **keys):
    return rl_settings({"reward_funcs": "tools.py:rate", "tools": list(tools), **keys})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tools.py").write_text(FILE, encoding="utf-8")
    return str(tmp_path)


def test_functions_are_shown_as_tools_and_called_in_a_process_of_their_own(folder):
    with Rewards(settings("tools.py:add", "tools.py:later", reward_timeout=2.0), folder) as rewards:
        add, later = (shown["function"] for shown in rewards.tools)
        assert (add["name"], add["description"], later["name"]) == ("add", "Adds.", "later")
        assert add["parameters"]["properties"]["a"] == {"type": "integer", "description": "One number."}
        assert add["parameters"]["required"] == ["a"] and "return" not in add
        assert rewards.call(0, '{"a": 3}') == ("5", False)
        assert rewards.call(1, '{"text": "hi"}') == ("{'said': 'hi'}", False)
        said, failed = rewards.call(0, '{"b": 3}')
        assert failed and said.startswith("{'error': ") and "'a'" in said
        refused(RewardError, part("rl.tools: later has not returned after 2 s"), rewards.call, 1, '{"text": "sleep"}')


def test_what_cannot_be_a_tool_is_refused(folder):
    message = part("rl.tools: untold: transformers makes no tool of it: ")
    refused(RewardError, message, Rewards, settings("tools.py:untold"), folder)
    message = part("rl.tools[0] is 'exact_answer'. Write a function of a Python file")
    refused(ConfigError, message, settings, "exact_answer")
    twice = [tool("add")] * 2
    refused(ConfigError, part("of one name: add, add"), Tools, chat_tokenizer(HERMES_TOOLS), twice, None)
    message = part("needs a chat template that shows tools")
    refused(ConfigError, message, Tools, chat_tokenizer(CHATML), [tool("add")], None)
    with pytest.raises(ConfigError, match="Args in Google's style"):
        shown_tool(lambda a: a)


CALLS = {
    "hermes": (
        HERMES_TOOLS,
        'I see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "I see.",
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "llama3": (
        LLAMA3,
        '{"name": "add", "parameters": {"a": 1}}',
        "",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        "<|eot_id|>",
    ),
}


@pytest.mark.parametrize("form", CALLS)
def test_a_turn_with_calls_goes_on_with_what_the_template_writes_behind_it(form):
    template, text, said, behind, end = CALLS[form]
    tokenizer = chat_tokenizer(template)
    asked = []

    def call(number, arguments):
        asked.append((number, json.loads(arguments)))
        return "3", True

    tools = Tools(tokenizer, [tool("other"), tool("add")], call)
    turn = tools.read(text)
    assert (turn.text.strip(), turn.complete, [name for name, _ in turn.calls]) == (said, True, ["add"])
    results, failures = tools.results(turn)
    assert results == [{"role": "tool", "name": "add", "content": "3"}] and failures == 1
    assert asked == [(1, {"a": 1})]

    def tokens(text):
        return tokenizer.encode(text, add_special_tokens=False)

    assert tools.continuation(tokens(text + end), results) == tokens(behind)
    # An end that is not the template's comes before it.
    assert tools.continuation(tokens(text), results) == tokens(end + behind)
    assert not tools.read(text[:-12]).complete and not tools.read("I see.").complete
