"""Preferences in the layouts of TRL, LLaMA-Factory, Anthropic and UltraFeedback, read as a prompt and its answers.

A row holds a pair, the chosen and the rejected answer to one prompt, or one answer labeled as desirable or not::

    {"prompt", "chosen", "rejected"}         texts, or lists of messages (TRL)
    {"chosen", "rejected"}                   the same with the prompt in both, as their common beginning (TRL,
                                             UltraFeedback's binarized form), or two texts of "Human:" and "Assistant:"
                                             turns (Anthropic)
    {"conversations", "chosen", "rejected"}  messages, and one message each (LLaMA-Factory)
    {"instruction", "completions"}           of which the best and the worst overall_score are taken (UltraFeedback)
    {"prompt", "completion", "label"}        texts, or lists of messages (TRL)
    {"messages", "label"}                    the last message is what is judged (LLaMA-Factory)

"conversations" and "messages" are two names of one field, and so are "prompt" and "instruction". Each may come with
"system", a prompt, and "tools", a list of functions.
"""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

from mindlora.data.conversations import check_unicode, from_json, read_message, read_tools, with_system
from mindlora.data.conversion import UnusableRow
from mindlora.data.sources import Layout

FIELDS = ("prompt", "chosen", "rejected", "completion", "label", "messages", "completions", "system", "tools")
LAYOUT = Layout(FIELDS, defaults=dict.fromkeys(FIELDS), aliases={"messages": "conversations", "prompt": "instruction"})
Text = Union[str, List[Dict[str, Any]]]
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


class Preference(NamedTuple):
    """A prompt and the answers to it, all of them texts or lists of messages for a chat template.

    Attributes:
        prompt (str or list of dict): The prompt.
        answers (tuple): The chosen and the rejected answer, or the judged answer.
        desirable (bool or None): Whether the judged answer is desirable; None for a pair.
        tools (list of dict or None): As in Conversation.
    """

    prompt: Text
    answers: Tuple[Text, ...]
    desirable: Optional[bool]
    tools: Optional[List[Dict[str, Any]]]


def read_preference(record: Any) -> Preference:
    """Returns the preference in a row; raises UnusableRow if it holds none."""
    if not isinstance(record, dict):
        raise UnusableRow("not an object")
    present = {field: _value(record[field]) for field in FIELDS if record.get(field) is not None}
    prompt, answers, desirable = _judged(present) if "label" in present else _pair(present)
    if isinstance(prompt, str) != all(isinstance(answer, str) for answer in answers):
        raise UnusableRow("a prompt and answers of which some are texts and some are messages")
    if not isinstance(prompt, str):
        prompt = with_system(present.get("system"), prompt)
    elif present.get("system") or present.get("tools"):
        raise UnusableRow('a "system" or "tools" beside texts: write messages')
    if not all(map(_says_something, answers)):
        raise UnusableRow("an empty answer")
    if len(answers) == 2 and answers[0] == answers[1]:
        raise UnusableRow("two answers that are the same")
    preference = Preference(prompt, answers, desirable, read_tools(present.get("tools")))
    check_unicode(preference)
    return preference


def _value(value):
    """Returns the messages or label of a JSON string, the form that tables store; otherwise the value."""
    read = from_json(value)
    entries = read if isinstance(read, list) else [read]
    return read if isinstance(read, bool) or all(isinstance(entry, dict) for entry in entries) else value


def _judged(present):
    """Returns the prompt, the single answer, and whether it is desirable."""
    label = present["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise UnusableRow('a "label" that is neither true nor false')
    if "completion" in present and "prompt" in present:
        return _text(present["prompt"], "prompt"), (_text(present["completion"], "completion"),), bool(label)
    messages = _text(present.get("messages"), "messages")
    if isinstance(messages, str) or len(messages) < 2:
        raise UnusableRow('no "messages" with an answer, and no "prompt" with a "completion"')
    return messages[:-1], (messages[-1:],), bool(label)


def _pair(present):
    """Returns the prompt, the two answers, and None."""
    if "completions" in present:
        return (_text(present.get("prompt"), "prompt"), _best_and_worst(present["completions"]), None)
    for field in ("chosen", "rejected"):
        if field not in present:
            raise UnusableRow(f'no "{field}"')
    answers = tuple(_text(present[field], field) for field in ("chosen", "rejected"))
    # UltraFeedback's binarized form has both, and messages are the chosen answer again.
    prompt = next((_text(present[field], field) for field in ("prompt", "messages") if field in present), None)
    if all(isinstance(answer, str) for answer in answers):
        dialogues = [_dialogue(answer) for answer in answers]
        if prompt is None and all(dialogues):
            return (*_common_beginning(*dialogues), None)
        return (prompt, answers, None) if prompt is not None else (*_common_text(*answers), None)
    if isinstance(prompt, str) and all(not isinstance(a, str) and a[0]["role"] == "assistant" for a in answers):
        prompt = [{"role": "user", "content": prompt}]
    # The prompt may be a field, the beginning of both answers, or both.
    if isinstance(prompt, list) and any(answer[: len(prompt)] != prompt for answer in answers):
        return prompt, answers, None
    return (*_common_beginning(*answers), None)


def _text(value, field):
    """Returns a text, or the messages of a list or single object."""
    if isinstance(value, str):
        return value
    entries = [value] if isinstance(value, dict) else value
    if not isinstance(entries, list) or not entries:
        raise UnusableRow(f'"{field}" is neither a text nor messages')
    return [read_message(entry) for entry in entries]


def _dialogue(text):
    """Returns the messages of one of Anthropic's dialogues, or None for any other text."""
    parts = _TURN.split(text)
    if parts[0].strip() or len(parts) < 3:
        return None
    turns = zip(parts[1::2], parts[2::2])
    return [{"role": _SPEAKERS[speaker], "content": said.strip()} for speaker, said in turns]


def _common_beginning(chosen, rejected):
    """Returns the common prompt of two conversations, and the rest of each, which begins with an assistant's turn."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise UnusableRow("one answer is a text and the other messages")
    length = _common_length(chosen, rejected)
    # If the answers begin alike, or are the same, the assistant's last turn was judged.
    while length and not (length < min(len(chosen), len(rejected)) and chosen[length]["role"] == "assistant"):
        length -= 1
    if not length:
        raise UnusableRow("two conversations without a common prompt before the assistant's turn")
    return chosen[:length], (chosen[length:], rejected[length:])


def _common_text(chosen, rejected):
    length = _common_length(chosen, rejected)
    # Do not split a word.
    length = chosen.rfind(" ", 0, length) if not chosen[:length].endswith("\n") else length
    if length <= 0:
        raise UnusableRow('no "prompt", and two texts without a common beginning')
    return chosen[:length], (chosen[length:], rejected[length:])


def _common_length(first, second):
    """Returns the length of the common beginning of two texts or conversations, in characters or messages."""
    differing = (number for number, (one, other) in enumerate(zip(first, second)) if one != other)
    return next(differing, min(len(first), len(second)))


def _best_and_worst(completions):
    """Returns the responses with the highest and the lowest overall_score."""
    scored = []
    for entry in completions if isinstance(completions, list) else ():
        score = entry.get("overall_score") if isinstance(entry, dict) else None
        if isinstance(score, (int, float)) and isinstance(entry.get("response"), str):
            scored.append((score, entry["response"]))
    scores = [score for score, _ in scored]
    if len(set(scores)) < 2:
        raise UnusableRow('"completions" without two responses of different overall_score')
    return scored[scores.index(max(scores))][1], scored[scores.index(min(scores))][1]


def _says_something(answer):
    if isinstance(answer, str):
        return bool(answer.strip())
    last = answer[-1]
    return last["role"] == "assistant" and bool(last.get("tool_calls") or last["content"].strip())
