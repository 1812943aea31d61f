"""Conversion of instruction data in Alpaca's format to MindRecord, with the prompt masked out of the loss."""

import dataclasses
import string
from typing import Any, List, Optional, Sequence, Union

import numpy as np

from mindlora.core.errors import DataError
from mindlora.data import tokenizers
from mindlora.data.conversion import DataReport, Encoded, Examples, UnusableRow
from mindlora.data.pipeline import Settings, convert_examples
from mindlora.data.sources import Layout, Row

FIELDS = ("instruction", "input", "output")


@dataclasses.dataclass(frozen=True)
class PromptTemplate:
    """A template that makes a prompt from an instruction and an input, by one of two format strings.

    ``with_input`` is None if the template cannot take an input; ``without_input`` is for rows whose input is empty.
    """

    with_input: Optional[str]
    without_input: str

    def problem(self, record: dict) -> Optional[str]:
        """Returns why this template cannot take an otherwise valid record, or None if it can."""
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

    A format string must have {instruction} and, if rows have inputs, {input}; any other placeholder raises DataError.
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


def convert_alpaca(
    inputs: Union[str, Sequence[str]],
    output_path: str,
    tokenizer: Any,
    seq_length: int,
    *,
    template: str = "alpaca",
    **settings: Any,
) -> DataReport:
    """Writes instruction data as MindRecord with the prompt masked out of the loss.

    Rows that cannot be used (not an object, a field missing or not a string, an empty output, more than seq_length + 1
    tokens, and so on) are skipped and reported. Everything is checked before the first byte is written.

    Args:
        inputs (str or sequence of str): See mindlora.data.sources.read_inputs. A record is {"instruction", "input",
            "output"}, or, as in Alpaca's seed tasks, {"instruction", "instances": [{"input", "output"}, ...]}.
        output_path (str): Must end in .mindrecord; an index is written beside it, as NAME.mindrecord.db.
        tokenizer (str or tokenizer): A path for load_tokenizer, or a tokenizer that it returned.
        seq_length (int): seq_length of the model.
        template (str): See prompt_template.
        **settings: The other fields of Settings.

    Returns:
        DataReport.

    Raises:
        DataError: The input, the template, a number or an output path is wrong; no row is usable; or ``strict`` is True
            and a row is not usable.
        TokenizerError: The tokenizer cannot be loaded, used or trained.
    """
    examples = AlpacaExamples(prompt_template(template))
    return convert_examples(examples, inputs, output_path, tokenizer, Settings(seq_length, **settings))


def row_problem(record: Any) -> Optional[str]:
    """Returns why a record cannot be used, in words that group rows with the same problem, or None if it can."""
    if not isinstance(record, dict):
        return "not an object"
    if "instances" in record:
        return '"instances" is not a list with entries'
    for field in FIELDS:
        if field not in record:
            return f'no "{field}"'
        if not isinstance(record[field], str):
            return f'"{field}" is not a string'
    try:
        "".join(record[field] for field in FIELDS).encode("utf-8")
    except UnicodeEncodeError:
        return "not valid Unicode"
    if not record["output"].strip():
        return 'empty "output"'
    if not (record["instruction"] + record["input"]).strip():
        return 'empty "instruction" and "input"'
    return None


def instances(row: Row) -> List[Row]:
    """Returns a row for each instance of a seed task: {"instruction", "instances": [{"input", "output"}, ...]}."""
    location, record = row
    entries = record.get("instances") if isinstance(record, dict) else None
    if not isinstance(entries, list) or not entries:
        return [row]
    task = {key: value for key, value in record.items() if key != "instances"}
    rows = []
    for number, entry in enumerate(entries, 1):
        rows.append(Row(f"{location} (instance {number})", {**task, **entry} if isinstance(entry, dict) else entry))
    return rows


# A file whose rows all have no input needs no column for it.
LAYOUT = Layout(FIELDS, defaults={"input": ""}, expand=instances, expands=("instances",))


class AlpacaExamples(Examples):
    """Records of instruction, input and output; ``template`` makes the prompt."""

    layout = LAYOUT

    def __init__(self, template: PromptTemplate):
        self.template = template

    def parse(self, record: Any) -> Any:
        """See Examples."""
        problem = row_problem(record) or self.template.problem(record)
        if problem:
            raise UnusableRow(problem)
        return record

    def text(self, parsed: Any) -> str:
        """See Examples."""
        return self.template.prompt(parsed) + parsed["output"]

    def encode(self, parsed: Any, tokenizer: Any) -> Encoded:
        """See Examples, and encode_row."""
        special = tokenizers.special_ids(tokenizer)
        bos = [] if special.bos is None else [special.bos]
        prompt = bos + tokenizers.encode(tokenizer, self.template.prompt(parsed))
        tokens = prompt + tokenizers.encode(tokenizer, parsed["output"]) + [special.eos]
        return Encoded(np.array(tokens, np.int32), np.arange(len(tokens)) >= len(prompt))

    def cut(self, encoded: Encoded, limit: int) -> Encoded:
        """Cuts the end of the output, eos included; never cuts the prompt."""
        if not encoded.learned[:limit].any():
            raise UnusableRow(f"a prompt of more than {limit - 1} tokens")
        return Encoded(encoded.tokens[:limit], encoded.learned[:limit])
