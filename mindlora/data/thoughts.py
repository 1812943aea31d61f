"""The assistant's thoughts: in a field of its message or in its content, wherever the template reads them.

Templates that open the block of thoughts themselves read the thoughts from a field. In the content, thoughts would
follow an empty block; a server that does not separate them even omits the tag that begins them.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence

from mindlora.data.conversion import UnusableRow
from mindlora.models.thoughts import FAMILIES

# Names of the field, in servers and in templates.
FIELDS = ("reasoning_content", "reasoning", "thinking", "thoughts")
_THOUGHT, _ANSWER = "A thought.", "An answer."
# The tags in the contents of training data.
BEGIN, END = FAMILIES[0].begin, FAMILIES[0].end
Messages = List[Dict[str, Any]]


def field_of(render: Callable[[Messages], str]) -> Optional[str]:
    """Returns the field from which a chat template reads thoughts, or None; ``render`` returns the text of messages."""
    for field in FIELDS:
        if _THOUGHT in _rendered(render, {field: _THOUGHT}):
            return field
    return None


def writes_block(render: Callable[[Messages], str]) -> bool:
    """Returns whether a chat template writes a block of thoughts for a message without thoughts."""
    return END in _rendered(render, {})


def _rendered(render, fields):
    answer = {"role": "assistant", "content": _ANSWER, **fields}
    try:
        return render([{"role": "user", "content": "A question."}, answer])
    except Exception:  # A template is a program and may reject this conversation.
        return ""


def thoughts_of(message: Dict[str, Any]) -> Optional[str]:
    """Returns the thoughts in a field of a message, or None."""
    values = (message.get(field) for field in FIELDS)
    return next((value for value in values if isinstance(value, str) and value.strip()), None)


def with_thoughts_in(field: str, messages: Sequence[Dict[str, Any]]) -> Messages:
    """Returns the messages with the assistant's thoughts moved into this field."""
    return [_with_thoughts(message, field) if message["role"] == "assistant" else message for message in messages]


def _with_thoughts(message, field):
    thoughts, content = thoughts_of(message), message["content"]
    if thoughts is None:
        thoughts, content = _apart(content or "")
    if thoughts is None:
        return message
    others = {name: value for name, value in message.items() if name not in FIELDS}
    return {**others, "content": content, field: thoughts}


def _apart(content):
    """Splits a content into the thoughts at its beginning, even without an opening tag, and the rest."""
    before, end, answer = content.partition(END)
    _, begin, thoughts = before.partition(BEGIN)
    if not end or before[: before.find(BEGIN)].strip() and begin:
        return None, content
    thoughts = (thoughts if begin else before).strip("\n")
    return (thoughts, answer.lstrip("\n")) if thoughts.strip() else (None, content)


def check_blocks(messages: Sequence[Dict[str, Any]], text: str) -> None:
    """Raises UnusableRow if the text of messages has a second block of thoughts, or half a block, after the template's.

    The template must be one that writes a block in each turn of the assistant (see ``writes_block``).
    """
    turns = [message for message in messages if message["role"] == "assistant"]
    others = [message["content"] or "" for message in messages if message["role"] != "assistant"]
    most = len(turns) + sum(content.count(END) for content in others)
    if any(END in (message["content"] or "") for message in turns) and text.count(END) > most:
        raise UnusableRow(f'"{END}" in the assistant\'s content, behind the block that the chat template writes itself')
