"""Rows as JSON: a list of objects, or one object per line."""

import json
import re
from typing import Any, List

from mindlora.data.rows import Row
from mindlora.errors import DataError

_BETWEEN_RECORDS = re.compile(r"[\s,]*")


def read_json_lines(path: str, text: str) -> List[Row]:
    """Returns the rows of a .jsonl file; a location names the line.

    Raises:
        DataError: A line is not JSON.
    """
    # Not splitlines, which also splits at characters that JSON allows inside a string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [Row(f"line {number}", _parse(path, line, number)) for number, line in lines]


def read_json_list(path: str, text: str) -> List[Row]:
    """Returns the rows of a .json file; a location names the line on which the row starts.

    Raises:
        DataError: The text is not JSON, or not a list.
    """
    records = _parse(path, text)
    if not isinstance(records, list):
        raise DataError(f"{path} holds a JSON {type(records).__name__}, not a list of rows.")
    # The text is known to be a JSON list, so a second pass over it only has to find where each record starts.
    scan = json.JSONDecoder().raw_decode
    position, line, counted, located = text.index("[") + 1, 1, 0, []
    for number, record in enumerate(records, 1):
        position = _BETWEEN_RECORDS.match(text, position).end()
        line, counted = line + text.count("\n", counted, position), position
        located.append(Row(f"row {number} at line {line}", record))
        position = scan(text, position)[1]
    return located


def _parse(path: str, text: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        # Some write one object per line and still name the file .json.
        lines = " If each line holds one object, name it .jsonl." if error.msg == "Extra data" else ""
        raise DataError(
            f"{path} is not valid JSON at line {line}, column {error.colno}: {error.msg}.{lines}"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply at line {first_line}.") from error
