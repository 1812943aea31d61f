"""How families of models mark the thoughts before their answers."""

import dataclasses
from typing import Optional


@dataclasses.dataclass(frozen=True)
class Marks:
    """The marks that a family of models writes before and behind a thought."""

    begin: str
    end: str


# Qwen3, QwQ, DeepSeek-R1, GLM and others; Magistral.
FAMILIES = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))


def marks_of(template: str) -> Optional[Marks]:
    """Returns the marks of thoughts in a model's chat template, or None if it has none."""
    return next((marks for marks in FAMILIES if marks.end in template), None)


def behind_thought(text: str) -> str:
    """Returns the answer behind its thought: all of a text without one, nothing while the thought has not ended."""
    for marks in FAMILIES:
        thought, end, answer = text.partition(marks.end)
        if end:
            return answer
        if thought.lstrip().startswith(marks.begin):
            return ""
    return text
