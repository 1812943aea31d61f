"""Thoughts: a model's thoughts before its answers, and their separation from the answers."""

import dataclasses
import json
from typing import Any, Mapping, Optional, Sequence, Tuple

from mindlora.models.thoughts import FAMILIES, Marks
from mindlora.serving.constraints import Constraint

# Templates' names for the switch against thoughts: Qwen3, GLM, SmolLM; DeepSeek, Granite; OpenAI.
WITHOUT = {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
# Tokens at the end of a prompt that can begin a thought, or end it.
_TAIL = 16


@dataclasses.dataclass(frozen=True)
class Thoughts:
    """The thought that may come before an answer.

    Attributes:
        begun (bool): Whether the prompt has begun the thought; otherwise the answer may begin one.
        tokens (dict): Token of each mark that is a single token.
    """

    marks: Marks
    begun: bool
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def nothing(self) -> str:
        """The text that ends an empty thought, with which an answer without a thought begins."""
        return ("" if self.begun else f"{self.marks.begin}\n") + f"\n{self.marks.end}\n\n"

    def before(self, constraint: Constraint) -> Constraint:
        """Returns a constraint that lets a thought come first."""
        begin, end = self.marks.begin, self.marks.end
        # Quoted text stands only for ordinary tokens, so the grammar names a mark that is one token by its number.
        opening = f"<[{self.tokens[begin]}]>" if begin in self.tokens else json.dumps(begin)
        if end in self.tokens:
            rules = [f"thought: THOUGHT <[{self.tokens[end]}]>"]
        else:
            rules = [f"thought[lazy]: THOUGHT {json.dumps(end)}"]
        first = "thought BREAK?" if self.begun else f"({opening} thought BREAK?)?"
        rules += [f"start: {first} reply", r"BREAK: /\n{1,2}/", "THOUGHT: /(?s:.*)/"]
        if constraint.kind == "lark":
            # A grammar of our own, whose rules stand beside these.
            rules.append(constraint.value.replace("start:", "reply:", 1))
            return dataclasses.replace(constraint, value="\n".join(rules))
        rules.append("reply: @reply")
        return Constraint("lark", "\n".join(rules), constraint.field, {"reply": constraint})


def thoughts_after(prompt: Sequence[int], tokenizer: Any, marks: Marks) -> Optional[Thoughts]:
    """Returns the thoughts that the answer to a prompt may have; None if the prompt has ended the thought."""
    tail = tokenizer.decode(list(prompt[-_TAIL:]), clean_up_tokenization_spaces=False).rstrip()
    if tail.endswith(marks.end):
        return None
    own = tokenizer.get_added_vocab()
    tokens = {mark: own[mark] for mark in (marks.begin, marks.end) if mark in own}
    return Thoughts(marks, tail.endswith(marks.begin), tokens)


class ThoughtReader:
    """Splits an answer as it arrives into its thought, without marks and the new lines around them, and the rest."""

    def __init__(self, thoughts: Optional[Thoughts]):
        self._marks = thoughts.marks if thoughts is not None else FAMILIES[0]
        self._stage = "answer" if thoughts is None else "thought" if thoughts.begun else "beginning"
        self._held = ""
        self._is_blank = True

    @property
    def thinks(self) -> bool:
        """Whether the next text is part of a thought."""
        return self._stage == "thought"

    def read(self, text: str, last: bool) -> Tuple[str, str]:
        """Returns a piece's additions to the thought and to the answer; ``last`` marks the last piece."""
        self._held += text
        thought = ""
        if self._stage == "beginning":
            self._begin(last)
        if self._stage == "thought":
            thought = self._think(last)
        if self._stage == "break":
            self._held = self._held.lstrip("\n")
            self._stage = "answer" if self._held else "break"
        if self._stage != "answer":
            return thought, ""
        answer, self._held = self._held, ""
        return thought, answer

    def _begin(self, last: bool) -> None:
        """Decides whether the answer begins with a thought, as soon as its text shows it."""
        said = self._held.lstrip()
        if said.startswith(self._marks.begin):
            self._stage, self._held = "thought", said[len(self._marks.begin) :]
        elif last or not self._marks.begin.startswith(said):
            self._stage = "answer"

    def _think(self, last: bool) -> str:
        """Returns the part of the held text that certainly belongs to the thought, and continues behind it."""
        held = self._held.lstrip("\n") if self._is_blank else self._held
        thought, end, rest = held.partition(self._marks.end)
        if end:
            self._stage, self._held = "break", rest
            return thought.rstrip("\n")
        ending = self._marks.end
        kept = next((count for count in range(len(ending) - 1, 0, -1) if held.endswith(ending[:count])), 0)
        thought = held if last else held[: len(held) - kept].rstrip("\n")
        self._held = held[len(thought) :]
        self._is_blank = self._is_blank and not thought
        return thought
