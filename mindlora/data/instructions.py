"""Instruction data: rows of instruction, input and output read from a file, checked, and put into a prompt."""

import dataclasses
import json
import re
import string
from typing import Any, List, NamedTuple, Optional

from mindlora.errors import LoraError

FIELDS = ("instruction", "input", "output")
_BETWEEN_RECORDS = re.compile(r"[\s,]*")


class DataError(LoraError):
    """A data file, a template or a setting of a conversion is wrong."""


class Row(NamedTuple):
    """One row of a file: where it stands, and what stands there, checked or not.

    Attributes:
        place (str): As "line 12" of a .jsonl, "row 3 at line 12" of a .json, or "line 12 (instance 2)".
        record: A dict with FIELDS if row_problem finds nothing wrong.
    """

    place: str
    record: Any


def read_rows(path: str) -> List[Row]:
    """Reads instruction data: a JSON list (.json) or one JSON value a line (.jsonl).

    A record is {"instruction", "input", "output"}, or, as in Alpaca's seed tasks, {"instruction", "instances":
    [{"input", "output"}, ...]}, which gives one row for each instance. Other keys are left unread.

    Args:
        path (str): File in UTF-8.

    Returns:
        list of Row, in the order of the file. A line is the one on which the record starts.

    Raises:
        DataError: The file is missing, empty, of another kind, not UTF-8 or not JSON.
    """
    text = read_text(path)
    if path.endswith(".jsonl"):
        # Not splitlines, which also splits at characters that JSON allows inside a string.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        records = [(f"line {number}", _parse(path, line, number)) for number, line in lines]
    elif path.endswith(".json"):
        records = _list_records(path, text)
    else:
        raise DataError(f"{path}: the name of instruction data ends in .json (a list) or .jsonl (one object a line).")
    if not records:
        raise DataError(f"{path} holds no rows.")
    return [row for place, record in records for row in _rows(place, record)]


def read_text(path: str) -> str:
    """Returns the text of a UTF-8 file; a byte order mark is dropped.

    Raises:
        DataError: The file is missing or not UTF-8.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DataError(f"There is no file {path}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: byte {error.start} cannot be read ({error.reason}).") from error


def row_problem(record: Any) -> Optional[str]:
    """Returns what makes a record unusable, in a few words that many rows can share, or None."""
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


@dataclasses.dataclass(frozen=True)
class PromptTemplate:
    """Makes a prompt of an instruction and an input.

    Attributes:
        with_input (str or None): Format string for rows that have an input; None if those have no place.
        without_input (str): Format string for rows whose input is empty.
    """

    with_input: Optional[str]
    without_input: str

    def problem(self, record: dict) -> Optional[str]:
        """Returns why this template cannot hold a good record, or None."""
        return "the template has no {input}" if record["input"] and self.with_input is None else None

    def prompt(self, record: dict) -> str:
        """Returns the text that stands before the output."""
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
    """Returns the template of a name in TEMPLATES, or one made of the user's own format string.

    Args:
        text (str): "alpaca", "plain", or a format string with {instruction} and, if rows may have one, {input}.

    Raises:
        DataError: Neither a name nor a format string with {instruction}, or it has another placeholder.
    """
    if text in TEMPLATES:
        return TEMPLATES[text]
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise DataError(f"template {text!r}: {error}. Write {{{{ and }}}} for braces that are text.") from error
    fields = {field for _, field, _, _ in parts if field is not None}
    unknown = sorted(fields - {"instruction", "input"})
    if unknown or any(spec or conversion for _, _, spec, conversion in parts):
        named = ", ".join(f"{{{field}}}" for field in unknown) or "a placeholder with a format or a conversion"
        raise DataError(f"template {text!r} has {named}. It can hold {{instruction}} and {{input}}, written so.")
    if "instruction" not in fields:
        raise DataError(f"template {text!r} is neither {' nor '.join(TEMPLATES)} nor a text with {{instruction}}.")
    return PromptTemplate(text if "input" in fields else None, text)


def _parse(path, text, first_line=1):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path} is not valid JSON at line {line}, column {error.colno}: {error.msg}.") from error


def _list_records(path, text):
    records = _parse(path, text)
    if not isinstance(records, list):
        raise DataError(f"{path} holds a JSON {type(records).__name__}, not a list of rows.")
    # The text is known to be a JSON list, so a second walk over it has only to find where each record starts.
    scan = json.JSONDecoder().raw_decode
    position, line, counted, placed = text.index("[") + 1, 1, 0, []
    for number, record in enumerate(records, 1):
        position = _BETWEEN_RECORDS.match(text, position).end()
        line, counted = line + text.count("\n", counted, position), position
        placed.append((f"row {number} at line {line}", record))
        position = scan(text, position)[1]
    return placed


def _rows(place, record):
    instances = record.get("instances") if isinstance(record, dict) else None
    if not isinstance(instances, list) or not instances:
        return [Row(place, record)]
    task = {key: value for key, value in record.items() if key != "instances"}
    return [
        Row(f"{place} (instance {number})", {**task, **instance} if isinstance(instance, dict) else instance)
        for number, instance in enumerate(instances, 1)
    ]
