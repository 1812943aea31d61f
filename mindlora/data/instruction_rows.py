"""Reading instruction data: rows of instruction, input and output, as JSON or JSON Lines."""

import json
import re
from typing import Any, List, NamedTuple, Optional

from mindlora.errors import DataError

FIELDS = ("instruction", "input", "output")
_BETWEEN_RECORDS = re.compile(r"[\s,]*")


class Row(NamedTuple):
    """One row of a file, and where it is in the file.

    Attributes:
        location (str): Such as "line 12" in a .jsonl, "row 3 at line 12" in a .json, or "line 12 (instance 2)".
        record: A dict with FIELDS, unless row_problem returns a problem.
    """

    location: str
    record: Any


def read_rows(path: str) -> List[Row]:
    """Reads instruction data: a JSON list (.json), or one JSON object per line (.jsonl).

    A record is {"instruction", "input", "output"}, or, as in Alpaca's seed tasks, {"instruction", "instances":
    [{"input", "output"}, ...]}, which gives one row for each instance. Other keys are ignored.

    Args:
        path (str): File in UTF-8.

    Returns:
        list of Row, in the order of the file. A location names the line on which the record starts.

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
        raise DataError(
            f"{path}: instruction data must be a .json file (a list) or a .jsonl file (one object per line)."
        )
    if not records:
        raise DataError(f"{path} holds no rows.")
    return [row for location, record in records for row in _rows(location, record)]


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
    # The text is known to be a JSON list, so a second pass over it only has to find where each record starts.
    scan = json.JSONDecoder().raw_decode
    position, line, counted, located = text.index("[") + 1, 1, 0, []
    for number, record in enumerate(records, 1):
        position = _BETWEEN_RECORDS.match(text, position).end()
        line, counted = line + text.count("\n", counted, position), position
        located.append((f"row {number} at line {line}", record))
        position = scan(text, position)[1]
    return located


def _rows(location, record):
    instances = record.get("instances") if isinstance(record, dict) else None
    if not isinstance(instances, list) or not instances:
        return [Row(location, record)]
    task = {key: value for key, value in record.items() if key != "instances"}
    return [
        Row(f"{location} (instance {number})", {**task, **instance} if isinstance(instance, dict) else instance)
        for number, instance in enumerate(instances, 1)
    ]
