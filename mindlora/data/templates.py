"""Prompt templates: the text that an instruction and its input become."""

import dataclasses
import string
from typing import Optional

from mindlora.core.errors import DataError


@dataclasses.dataclass(frozen=True)
class PromptTemplate:
    """Makes a prompt from an instruction and an input, by one of two format strings.

    ``with_input`` is None if the template cannot take an input; ``without_input`` is for rows whose input is empty.
    """

    with_input: Optional[str]
    without_input: str

    def problem(self, record: dict) -> Optional[str]:
        """Returns why this template cannot take a record that is otherwise good, or None if it can."""
        return "the template has no {input}" if record["input"] and self.with_input is None else None

    def prompt(self, record: dict) -> str:
        """Returns the text that precedes the output."""
        template = self.with_input if record["input"] else self.without_input
        return template.format(instruction=record["instruction"], input=record["input"])


# "alpaca" is the prompt of Stanford Alpaca (Taori et al., 2023); models tuned on it expect every character of it.
TEMPLATES = {
    "alpaca": PromptTemplate(
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:",
    ),
    "plain": PromptTemplate("{instruction}\n{input}\n", "{instruction}\n"),
}


def prompt_template(text: str) -> PromptTemplate:
    """Returns the template named "alpaca" or "plain", or one made from the user's own format string.

    That must have {instruction} and, if rows have inputs, {input}; with anything else it raises DataError.
    """
    if text in TEMPLATES:
        return TEMPLATES[text]
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise DataError(f"template {text!r}: {error}. Write {{{{ and }}}} for literal braces.") from error
    fields = {field for _, field, _, _ in parts if field is not None}
    unknown = sorted(fields - {"instruction", "input"})
    if unknown or any(spec or conversion for _, _, spec, conversion in parts):
        named = ", ".join(f"{{{field}}}" for field in unknown) or "a placeholder with a format or a conversion"
        raise DataError(
            f"template {text!r} has {named}. Only {{instruction}} and {{input}}, written like this, are allowed."
        )
    if "instruction" not in fields:
        raise DataError(
            f"template {text!r} is neither {' nor '.join(TEMPLATES)} nor a text with {{instruction}} in it."
        )
    return PromptTemplate(text if "input" in fields else None, text)
