"""Reading conversations: ShareGPT's and OpenAI's layouts become the same messages, and others are refused."""

import json

import pytest

from mindlora.data.conversations import read_conversation, texts_of
from mindlora.data.conversion import UnusableRow

CALL = {"name": "add", "arguments": {"a": 1}}
CALLS = [{"type": "function", "function": CALL}]
TOOL = {"name": "add", "parameters": {}}
OPENAI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "2", "tool_call_id": "7"},
    {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "2."}]},
]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "1 + 1?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "It is 2."},
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": SHAREGPT, "tools": [TOOL]},
        {"messages": json.dumps(SHAREGPT), "tools": json.dumps([TOOL])},
        {"messages": SHAREGPT[1:], "system": "Be brief.", "tools": [{"type": "function", "function": TOOL}]},
        {"messages": MESSAGES, "system": " ", "tools": [TOOL]},
    ],
)
def test_layouts_of_the_same_conversation(record):
    conversation = read_conversation(record)
    assert conversation.messages == MESSAGES
    assert conversation.tools == [{"type": "function", "function": TOOL}]
    assert texts_of(conversation) == "Be brief.\n1 + 1?\n\n2\nIt is 2."


def test_what_else_a_message_has_is_kept():
    messages = read_conversation({"messages": OPENAI}).messages
    assert [message["content"] for message in messages] == [message["content"] for message in MESSAGES]
    assert messages[2]["tool_calls"] == [{"id": "7", **CALLS[0]}] and messages[3]["tool_call_id"] == "7"
    old = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    answer = {"role": "function", "name": "add", "content": "2"}
    found = read_conversation({"messages": [old, answer], "tools": ""})
    assert found.messages == [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "2", "name": "add"},
    ]
    assert found.tools is None
    thinking = {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": [], "name": None}
    assert read_conversation({"messages": [thinking]}).messages == [
        {"role": "assistant", "content": "a", "reasoning_content": "b"}
    ]


USER, GPT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "record, reason",
    [
        (5, "not an object"),
        ({"text": "a"}, 'no "messages"'),
        ({"messages": []}, '"messages" is not a list with entries'),
        ({"messages": "Hello [1]"}, '"messages" is not a list with entries'),
        ({"messages": ["a"]}, "a message is not an object"),
        ({"messages": [{"role": "bot", "content": "a"}]}, 'a message whose "role" is "bot"'),
        ({"messages": [{"from": None, "value": "a"}]}, 'a message whose "from" is null'),
        ({"messages": [{"content": "a"}]}, 'a message whose "role" is null'),
        ({"messages": [USER, {"role": "assistant", "content": 5}]}, 'a message whose "content" is not text'),
        ({"messages": [{"from": "human", "value": ["a"]}, GPT]}, 'a message whose "value" is not text'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, GPT]}, 'whose "content" is not text'),
        ({"messages": [USER]}, "no turn of the assistant"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "an empty turn of the assistant"),
        ({"messages": [{"role": "system", "content": "a"}, GPT], "system": "b"}, 'a "system" beside'),
        ({"messages": [GPT], "system": 5}, '"system" is not a string'),
        ({"messages": [GPT], "tools": {"a": 1}}, '"tools" is not a list of functions'),
        ({"messages": [GPT], "tools": [{"type": "function"}]}, '"tools" is not a list of functions'),
        ({"messages": [GPT], "tools": [{"function": "f"}]}, '"tools" is not a list of functions'),
        ({"messages": [{"from": "function_call", "value": "add(1)"}]}, "a call of a tool that cannot be read"),
        ({"messages": [{**GPT, "tool_calls": {"name": "f"}}]}, "a call of a tool that cannot be read"),
        ({"messages": [{**GPT, "tool_calls": [{"name": "f", "arguments": "x"}]}]}, "a call of a tool"),
        ({"messages": [{**GPT, "tool_calls": [{"function": {"arguments": {}}}]}]}, "a call of a tool"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "not valid Unicode"),
    ],
)
def test_what_is_no_conversation(record, reason):
    with pytest.raises(UnusableRow) as caught:
        read_conversation(record)
    assert reason in str(caught.value)
