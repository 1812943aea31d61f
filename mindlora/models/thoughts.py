"""How families of models mark what they think before they answer."""

import dataclasses
from typing import Optional


@dataclasses.dataclass(frozen=True)
class Marks:
    """What a family of models writes before and behind a thought."""

    begin: str
    end: str


# Qwen3, QwQ, DeepSeek-R1, GLM and others; Magistral.
FAMILIES = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))


def marks_of(template: str) -> Optional[Marks]:
    """Returns how a model marks thoughts, by its chat template; None if that knows none."""
    return next((marks for marks in FAMILIES if marks.end in template), None)


def behind_thought(text: str) -> str:
    """Returns what an answer says behind its thought: all of it where it has none, nothing where it has not ended."""
    for marks in FAMILIES:
        thought, end, answer = text.partition(marks.end)
        if end:
            return answer
        if thought.lstrip().startswith(marks.begin):
            return ""
    return text
