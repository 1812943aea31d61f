"""Rows of instruction, input and output: Alpaca's format, and that of its seed tasks."""

from typing import Any, List, Optional

from mindlora.data.rows import Layout, Row

FIELDS = ("instruction", "input", "output")


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
    given = record.get("instances") if isinstance(record, dict) else None
    if not isinstance(given, list) or not given:
        return [row]
    task = {key: value for key, value in record.items() if key != "instances"}
    return [
        Row(f"{location} (instance {number})", {**task, **instance} if isinstance(instance, dict) else instance)
        for number, instance in enumerate(given, 1)
    ]


# A file whose rows all have no input needs no column for it.
LAYOUT = Layout(FIELDS, defaults={"input": ""}, expand=instances, expands=("instances",))
