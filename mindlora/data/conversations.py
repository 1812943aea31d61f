"""Conversion of stored conversations, in ShareGPT's or OpenAI's layout, to the messages that chat templates take."""

import json
from typing import Any, Dict, List, NamedTuple, Optional

from mindlora.data.conversion import UnusableRow
from mindlora.data.sources import Layout

# Names of the speakers in ShareGPT and OpenAI (some of them old) -> the roles that chat templates know.
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response"), "tool"),
}
LAYOUT = Layout(
    fields=("messages", "system", "tools"), defaults={"system": "", "tools": []}, aliases={"messages": "conversations"}
)


class Conversation(NamedTuple):
    """Messages for a chat template.

    Attributes:
        messages (list of dict): Each with "role" (system, user, assistant or tool), "content", a string, and the
            message's other fields; tool calls are in "tool_calls", with their arguments as an object, and the content
            of such a message may be None.
        tools (list of dict or None): The functions that the assistant may call, as JSON schemas.
    """

    messages: List[Dict[str, Any]]
    tools: Optional[List[Dict[str, Any]]]


def read_conversation(record: Any) -> Conversation:
    """Returns the conversation in a row; raises UnusableRow if it holds none with an assistant.

    The row has "messages": a list of {"role", "content"} (OpenAI) or {"from", "value"} (ShareGPT), or such a list as a
    JSON string. It may also have "system", a prompt, and "tools", a list of functions.
    """
    if not isinstance(record, dict):
        raise UnusableRow("not an object")
    if "messages" not in record:
        raise UnusableRow('no "messages"')
    entries = from_json(record["messages"])
    if not isinstance(entries, list) or not entries:
        raise UnusableRow('"messages" is not a list with entries')
    messages = with_system(record.get("system"), [read_message(entry) for entry in entries])
    if all(message["role"] != "assistant" for message in messages):
        raise UnusableRow("no turn of the assistant")
    conversation = Conversation(messages, read_tools(record.get("tools")))
    check_unicode(conversation)
    return conversation


def with_system(prompt: Optional[str], messages: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Returns messages with a system prompt before them, if there is one; raises UnusableRow if they have their own."""
    messages = _system_prompt(prompt) + messages
    if [message["role"] for message in messages[:2]] == ["system", "system"]:
        raise UnusableRow('a "system" beside a system message')
    return messages


def check_unicode(value: Any) -> None:
    """Raises UnusableRow if a text in a value, such as a Conversation, is not valid Unicode."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise UnusableRow("not valid Unicode") from None


def has_nulls(conversation: Conversation) -> bool:
    """Returns whether a tool or a tool call holds a null at any depth."""
    calls = [call["function"] for message in conversation.messages for call in message.get("tool_calls") or ()]
    return _holds_null([calls, conversation.tools or []])


def _holds_null(value):
    if isinstance(value, (dict, list)):
        return any(map(_holds_null, value.values() if isinstance(value, dict) else value))
    return value is None


def texts_of(conversation: Conversation) -> str:
    """Returns the texts of a conversation, for training a tokenizer."""
    return "\n".join(message["content"] or "" for message in conversation.messages)


def from_json(value: Any) -> Any:
    """Returns the value of a JSON string, since tables store lists as JSON; any other string is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return value


def _system_prompt(text):
    if not isinstance(text, (str, type(None))):
        raise UnusableRow('"system" is not a string')
    return [{"role": "system", "content": text}] if text and text.strip() else []


def read_message(entry: Any) -> Dict[str, Any]:
    """Returns a message as Conversation holds it; raises UnusableRow if it cannot be read."""
    if not isinstance(entry, dict):
        raise UnusableRow("a message is not an object")
    names = ("from", "value") if "from" in entry and "role" not in entry else ("role", "content")
    speaker, content = (entry.get(name) for name in names)
    if not isinstance(speaker, str) or speaker.lower() not in _ROLES:
        raise UnusableRow(f'a message whose "{names[0]}" is {json.dumps(speaker, ensure_ascii=False)[:40]}')
    rest = {key: value for key, value in entry.items() if key not in names and value is not None}
    message = {**rest, "role": _ROLES[speaker.lower()], "content": _text(content, names[1])}
    if speaker.lower() == "function_call":
        # ShareGPT's function_call is JSON: one call or a list of them.
        parsed = from_json(message["content"])
        calls = _calls(parsed if isinstance(parsed, list) else [parsed])
        message.update(content=None, tool_calls=calls)
    elif "function_call" in rest:
        message["tool_calls"] = _calls([message.pop("function_call")])
    elif message.pop("tool_calls", None):
        message["tool_calls"] = _calls(rest["tool_calls"])
    if not message.get("tool_calls"):
        message["content"] = message["content"] or ""
        if message["role"] == "assistant" and not message["content"].strip():
            raise UnusableRow("an empty turn of the assistant")
    return message


def _text(content, name):
    """Returns a message's text; in OpenAI's layout it may be null, beside tool calls, or a list of parts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, (str, type(None))):
        raise UnusableRow(f'a message whose "{name}" is not text')
    return content


def _calls(entries):
    if not isinstance(entries, list):
        raise UnusableRow("a call of a tool that cannot be read")
    calls = []
    for call in entries:
        function = call.get("function", call) if isinstance(call, dict) else None
        arguments = from_json(function.get("arguments", {})) if isinstance(function, dict) else None
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise UnusableRow("a call of a tool that cannot be read")
        outer = {} if function is call else call
        calls.append({**outer, "type": "function", "function": {**function, "arguments": arguments}})
    return calls


def read_tools(value: Any) -> Optional[List[Dict[str, Any]]]:
    """Returns a list of functions as Conversation holds it; raises UnusableRow if it cannot be read."""
    tools = from_json(value) if value else None
    if not tools:
        return None
    # Some files list the functions without OpenAI's wrapper around them.
    tools = tools if isinstance(tools, list) else [None]
    bare = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools]
    if not all(isinstance(function, dict) and "name" in function for function in bare):
        raise UnusableRow('"tools" is not a list of functions with names')
    return [{"type": "function", "function": function} for function in bare]
