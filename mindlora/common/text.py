"""Pieces of messages: lists of paths, the nearest known word, a value that may be long."""

import difflib
import math
from typing import Iterable, List


def listed(paths: Iterable[str]) -> str:
    """Returns paths as text for a message, with those that differ in layer numbers alone put into one."""
    return ", ".join(collapse_numbers(list(paths)))


def collapse_numbers(paths: List[str]) -> List[str]:
    """Returns ``paths`` with those that differ in layer numbers alone put into one, as ``layers.{0..31}.wq``."""
    groups = {}
    for path in paths:
        parts = path.split(".")
        shape = ".".join("#" if part.isdigit() else part for part in parts)
        groups.setdefault(shape, []).append(tuple(int(part) for part in parts if part.isdigit()))
    lines = []
    for shape, rows in groups.items():
        columns = [sorted(set(column)) for column in zip(*rows)]
        if math.prod(map(len, columns)) == len(set(rows)):
            lines.append(_numbered(shape, columns))
            continue
        # Not every combination is there, so one line would claim too many: only the first number is put together.
        for rest in dict.fromkeys(row[1:] for row in rows):
            first = sorted({row[0] for row in rows if row[1:] == rest})
            lines.append(_numbered(shape, [first] + [[number] for number in rest]))
    return lines


def _numbered(shape, columns) -> str:
    """Puts the numbers of each column at the next # of ``shape``."""
    for values in columns:
        text = str(values[0]) if len(values) == 1 else "{" + ",".join(map(str, values)) + "}"
        if len(values) > 1 and values == list(range(values[0], values[-1] + 1)):
            text = f"{{{values[0]}..{values[-1]}}}"
        shape = shape.replace("#", text, 1)
    return shape


def suggestion(word: str, known: List[str]) -> str:
    """Returns the end of an error message: the nearest known word, and all that are known."""
    near = difflib.get_close_matches(word, known, n=1)
    meant = f" Did you mean '{near[0]}'?" if near else ""
    return f"{meant} Known: {', '.join(sorted(known))}."


def shown(value) -> str:
    """Returns a value of a configuration for a message: not a megabyte of it, and a deeply nested one in words."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
