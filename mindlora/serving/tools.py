"""Tools: how a family of models calls them, the grammar that an answer keeps, and the calls in its text."""

import dataclasses
import json
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Union

from mindlora.serving.constraints import JSON_RULES, Constraint

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_TEXT = "/(?s:.*)/"


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes a call of a tool: ``begin``, the arguments as JSON, ``end``.

    Attributes:
        arguments (str): The key of the arguments beside "name".
        opening (str): What comes before the object; "" where the answer is the object alone.
        closing (str): What comes behind it.
    """

    arguments: str
    opening: str = ""
    closing: str = ""

    def begin(self, name: str) -> str:
        """Returns what comes before the arguments of a call."""
        return f'{self.opening}{{"name": "{name}", "{self.arguments}": '

    @property
    def end(self) -> str:
        """What comes behind the arguments; it is in no JSON."""
        return "}" + self.closing


# NousResearch's Hermes 2 Pro, Qwen2.5, Qwen3.
HERMES = ToolFormat("arguments", f"{_CALL}\n", f"\n{_CALL_END}")
LLAMA3 = ToolFormat("parameters")


def format_of(template: str) -> Optional[ToolFormat]:
    """Returns how a model calls tools, by its chat template; None if that shows no tools, or in another way."""
    if "tools" not in template:
        return None
    if _CALL in template:
        return HERMES
    return LLAMA3 if "<|start_header_id|>" in template and '"parameters"' in template else None


def tool_constraint(
    form: ToolFormat, tools: Sequence[Dict[str, Any]], required: bool, several: bool, own_tokens: Sequence[str]
) -> Constraint:
    """Returns what an answer must be that calls tools, each with arguments of its schema.

    Args:
        tools (sequence of dict): Each {"name": str, "parameters": JSON schema}.
        required (bool): Whether the answer must call one, or may be any other text.
        several (bool): Whether it may call more than one.
        own_tokens (sequence of str): The texts for which the tokenizer has a token of its own, which is used there.
    """
    opening, closing = (_literal(text, own_tokens) for text in (form.opening, form.closing))
    call = f"{opening} rest".strip()
    more = f' ("\\n" {call})*' if several and form.opening else ""
    lines = []
    if required:
        lines.append(f"start: {call}{more}")
    elif not form.opening:
        # What begins as a call is one.
        lines += ["start: TEXT | rest", "TEXT: /[^{](?s:.*)/"]
    elif _CALL in own_tokens:
        lines += [f"start: TEXT ({call}{more})?", f"TEXT: {_TEXT}"]
    else:
        lines += [f'start: TEXT | until "\\n" rest{more}', f'until[lazy]: TEXT "{_CALL}"', f"TEXT: {_TEXT}"]
    lines.append("rest: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        begin = form.begin(tool["name"])[len(form.opening) :]
        lines.append(f"call_{number}: {json.dumps(begin)} arguments_{number} " + f'"}}" {closing}'.strip())
        lines.append(f"arguments_{number}: %json {json.dumps({**tool['parameters'], 'x-guidance': JSON_RULES})}")
    return Constraint("lark", "\n".join(lines), "tools")


def _literal(text: str, own_tokens: Sequence[str]) -> str:
    """Returns a text as a grammar has it: tokens of their own stand there without quotes."""
    for token in (_CALL, _CALL_END):
        if token in text and token in own_tokens:
            before, after = text.split(token)
            return " ".join(filter(None, (before and json.dumps(before), token, after and json.dumps(after))))
    return json.dumps(text) if text else ""


class CallBegin(NamedTuple):
    """The name of the next call."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of a call."""

    number: int
    text: str


Part = Union[str, CallBegin, CallArguments]


class CallReader:
    """Takes an answer apart as it comes: text, names of calls, and their arguments.

    It relies on the grammar: whatever begins as a call is one, of a known tool.
    """

    def __init__(self, form: ToolFormat, names: Sequence[str]):
        self._form = form
        self._begins = {form.begin(name): name for name in names}
        self._held = ""
        self._count = 0
        self._in_call = False
        self._is_text = False

    @property
    def complete(self) -> bool:
        """Whether the answer has calls, all of them to their ends."""
        return self._count > 0 and not self._in_call

    def read(self, text: str, last: bool) -> List[Part]:
        """Returns what a piece of the answer adds; ``last`` says that no more comes."""
        self._held += text
        parts: List[Part] = []
        while True:
            part = self._arguments(last) if self._in_call else self._text(last)
            if part is None:
                return parts
            if part:
                parts.append(part)

    def _text(self, last: bool) -> Optional[Part]:
        """Returns the next part outside of calls, "" for what says nothing; None if there is none yet."""
        held = self._held
        if not held:
            return None
        begin = self._next_begin()
        if begin is not None:
            before = held[: held.find(begin)]
            if before.strip() and not self._count:
                self._held = held[len(before) :]
                return before
            self._held = held[len(before) + len(begin) :]
            self._in_call = True
            self._count += 1
            return CallBegin(self._count - 1, self._begins[begin])
        if last:
            self._held = ""
            return "" if self._count else held
        if not self._form.opening:
            if self._is_text or not held.startswith("{"):
                self._is_text, self._held = True, ""
                return held
            return None
        kept = _overlap(held, [*self._begins, *(f"\n{begin}" for begin in self._begins)])
        self._held = held[len(held) - kept :]
        text = held[: len(held) - kept]
        return (text if not self._count else "") if text else None

    def _next_begin(self) -> Optional[str]:
        """Returns what begins the next call in what is held; without an opening, that must be all of the answer."""
        places = {begin: self._held.find(begin) for begin in self._begins}
        known = [begin for begin, place in places.items() if place == 0 or place > 0 and self._form.opening]
        return min(known, key=places.__getitem__, default=None)

    def _arguments(self, last: bool) -> Optional[Part]:
        held, end = self._held, self._form.end
        place = held.find(end) if self._form.closing else (len(held) - 1 if last and held.endswith(end) else -1)
        if place >= 0:
            self._held = held[place + len(end) :]
            self._in_call = False
            return CallArguments(self._count - 1, held[:place]) if place else ""
        kept = 0 if last else _overlap(held, [end])
        text, self._held = held[: len(held) - kept], held[len(held) - kept :]
        return CallArguments(self._count - 1, text) if text else None


def _overlap(text: str, begins: Sequence[str]) -> int:
    """Returns how many characters at the end of ``text`` may begin one of ``begins``."""
    for count in range(min(len(text), max(map(len, begins))), 0, -1):
        if any(begin.startswith(text[-count:]) for begin in begins):
            return count
    return 0
