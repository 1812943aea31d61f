"""Tools: how a family of models calls them, the grammar of such answers, and the calls in their text."""

import dataclasses
import json
from typing import Dict, List, NamedTuple, Optional, Sequence, Union

from mindlora.serving.constraints import Constraint

# The text that Hermes and Qwen write around a call.
CALL_MARKS = _CALL, _CALL_END = "<tool_call>", "</tool_call>"
_TEXT = "/(?s:.*)/"


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """A family of models' form of a tool call: ``begin``, the arguments as JSON, ``end``.

    Attributes:
        arguments (str): The key of the arguments beside "name".
        opening (str): The text before the object; "" if the answer is only the object.
        closing (str): The text behind it.
    """

    arguments: str
    opening: str = ""
    closing: str = ""

    def begin(self, name: str) -> str:
        """Returns the text before the arguments of a call."""
        return f'{self.opening}{{"name": "{name}", "{self.arguments}": '

    @property
    def end(self) -> str:
        """The text behind the arguments, which never occurs in JSON."""
        return "}" + self.closing


# NousResearch's Hermes 2 Pro, Qwen2.5, Qwen3.
HERMES = ToolFormat("arguments", f"{_CALL}\n", f"\n{_CALL_END}")
LLAMA3 = ToolFormat("parameters")


def format_of(template: str) -> Optional[ToolFormat]:
    """Returns a model's form of tool calls, by its chat template; None if that shows no tools, or in another form."""
    if "tools" not in template:
        return None
    if _CALL in template:
        return HERMES
    return LLAMA3 if "<|start_header_id|>" in template and '"parameters"' in template else None


def tool_constraint(
    form: ToolFormat,
    tools: Dict[str, Constraint],
    required: bool,
    several: bool,
    own_tokens: Sequence[str],
    answer: Optional[Constraint] = None,
) -> Constraint:
    """Returns the constraint on an answer that calls tools, each with arguments that satisfy its schema.

    Args:
        tools (dict): Name of each tool -> constraint on its arguments.
        required (bool): Whether the answer must call one, rather than also be something else.
        several (bool): Whether it may call more than one.
        own_tokens (sequence of str): The texts for which the tokenizer has a single token, which the constraint uses.
        answer (Constraint, optional): The constraint on an answer without a call. Default: None, any text, which may
            also come before calls.
    """
    opening, closing = (_literal(text, own_tokens) for text in (form.opening, form.closing))
    call = f"{opening} rest".strip()
    more = f' ("\\n" {call})*' if several and form.opening else ""
    parts = {f"arguments_{number}": arguments for number, arguments in enumerate(tools.values())}
    if required:
        lines = [f"start: {call}{more}"]
    elif answer is not None:
        lines = [f"start: {call}{more} | @answer"]
        parts["answer"] = answer
    elif not form.opening:
        # Text that begins like a call is one.
        lines = ["start: TEXT | rest", "TEXT: /[^{](?s:.*)/"]
    elif _CALL in own_tokens:
        lines = [f"start: TEXT ({call}{more})?", f"TEXT: {_TEXT}"]
    else:
        lines = [f'start: TEXT | until "\\n" rest{more}', f'until[lazy]: TEXT "{_CALL}"', f"TEXT: {_TEXT}"]
    lines.append("rest: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, name in enumerate(tools):
        begin = form.begin(name)[len(form.opening) :]
        lines.append(f"call_{number}: {json.dumps(begin)} @arguments_{number} " + f'"}}" {closing}'.strip())
    return Constraint("lark", "\n".join(lines), "tools", parts)


def _literal(text: str, own_tokens: Sequence[str]) -> str:
    """Returns a text in a grammar's form, in which single tokens stand without quotes."""
    for token in CALL_MARKS:
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
    """Splits an answer as it arrives into text, names of calls, and their arguments.

    It relies on the grammar: text that begins like a call is one, of a known tool. A call that is cut off has the
    received part of its arguments, and none of the text around them. If an answer has only calls (``required``),
    nothing is text, not even the beginning of a call that is cut off before its name.
    """

    def __init__(self, form: ToolFormat, names: Sequence[str], required: bool = False):
        self._form = form
        self._begins = {form.begin(name): name for name in names}
        self._held = ""
        self._count = 0
        self._arguments: Optional[_JsonEnd] = None
        self._required = required
        self._is_text = False

    @property
    def complete(self) -> bool:
        """Whether the answer has calls, all of them complete."""
        return self._count > 0 and self._arguments is None

    def read(self, text: str, last: bool) -> List[Part]:
        """Returns a piece's addition to the answer; ``last`` marks the last piece."""
        self._held += text
        parts: List[Part] = []
        while self._held:
            part = self._text(last) if self._arguments is None else self._call(self._arguments)
            if part is None:
                break
            if part:
                parts.append(part)
        return parts

    def _call(self, arguments: "_JsonEnd") -> Optional[Part]:
        """Returns the next part of a call, "" for the text around its arguments; None if there is none yet."""
        count = arguments.find(self._held)
        if count:
            text, self._held = self._held[:count], self._held[count:]
            return CallArguments(self._count - 1, text)
        if len(self._held) < len(self._form.end):
            return None
        self._held = self._held[len(self._form.end) :]
        self._arguments = None
        return ""

    def _text(self, last: bool) -> Optional[Part]:
        """Returns the next part outside calls, "" for text without content; None if there is none yet."""
        held = self._held
        begin = self._next_begin()
        if begin is not None:
            before = held[: held.find(begin)]
            if before.strip() and not self._count:
                self._held = held[len(before) :]
                return before
            self._held = held[len(before) + len(begin) :]
            self._arguments = _JsonEnd()
            self._count += 1
            return CallBegin(self._count - 1, self._begins[begin])
        kept = self._may_begin(held)
        if last and not kept.strip().startswith(self._form.opening.strip()):
            kept = ""
        text, self._held = held[: len(held) - len(kept)], kept
        self._is_text = self._is_text or bool(text)
        if not text:
            return None
        return "" if self._count or self._required else text

    def _next_begin(self) -> Optional[str]:
        """Returns the beginning of the next call in the held text; without an opening, it must be the whole answer."""
        places = {begin: self._held.find(begin) for begin in self._begins}
        if self._form.opening:
            known = [begin for begin, place in places.items() if place >= 0]
        else:
            known = [begin for begin, place in places.items() if place == 0 and not self._is_text]
        return min(known, key=places.__getitem__, default=None)

    def _may_begin(self, held: str) -> str:
        """Returns the end of the held text that may be the beginning of a call."""
        if self._form.opening:
            return held[len(held) - _overlap(held, [*self._begins, *(f"\n{begin}" for begin in self._begins)]) :]
        return held if not self._is_text and any(begin.startswith(held) for begin in self._begins) else ""


class _JsonEnd:
    """Finds the end of a JSON value that arrives in pieces and is followed by another brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._found = False

    def find(self, piece: str) -> int:
        """Returns how many of the next characters belong to the value."""
        if self._found:
            return 0
        for place, character in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character in "}]" and not self._depth:
                self._found = True
                return place
            else:
                self._in_string = character == '"'
                self._depth += (character in "{[") - (character in "}]")
        return len(piece)


def _overlap(text: str, begins: Sequence[str]) -> int:
    """Returns how many characters at the end of ``text`` may begin one of ``begins``."""
    for count in range(min(len(text), max(map(len, begins))), 0, -1):
        if any(begin.startswith(text[-count:]) for begin in begins):
            return count
    return 0
