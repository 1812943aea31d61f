"""Parts of messages: lists of paths, the nearest known word, a value that may be long."""

import difflib
import math
from typing import Dict, Iterable, List, Sequence, Tuple


def listed(paths: Iterable[str]) -> str:
    """Returns paths as text for a message; those that differ only in numbers are combined."""
    return ", ".join(collapse_numbers(list(paths)))


def examples(paths: Iterable[str]) -> str:
    """Returns what ``listed`` does, but at most four entries and the number of the rest."""
    lines = collapse_numbers(list(paths))
    return ", ".join(lines[:4]) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")


def first_ten(names: Sequence[str]) -> str:
    """Returns the first ten names and whether there are more, or "nothing"."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") if names else "nothing"


def collapse_numbers(paths: List[str]) -> List[str]:
    """Returns ``paths``, those that differ only in numbers combined into one, such as ``layers.{0..31}.wq``."""
    groups: Dict[str, List[Tuple[int, ...]]] = {}
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
        # Some combinations are missing, so one line would claim too much: only the first number is combined.
        for rest in dict.fromkeys(row[1:] for row in rows):
            first = sorted({row[0] for row in rows if row[1:] == rest})
            lines.append(_numbered(shape, [first] + [[number] for number in rest]))
    return lines


def _numbered(shape: str, columns: List[List[int]]) -> str:
    """Replaces each # of ``shape`` by the numbers of its column."""
    for values in columns:
        text = str(values[0]) if len(values) == 1 else "{" + ",".join(map(str, values)) + "}"
        if len(values) > 1 and values == list(range(values[0], values[-1] + 1)):
            text = f"{{{values[0]}..{values[-1]}}}"
        shape = shape.replace("#", text, 1)
    return shape


def suggestion(word: str, known: List[str]) -> str:
    """Returns the end of an error message: the nearest known word, and all known words."""
    near = difflib.get_close_matches(word, known, n=1)
    meant = f" Did you mean '{near[0]}'?" if near else ""
    return f"{meant} Known: {', '.join(sorted(known))}."


def shown(value: object) -> str:
    """Returns a value of a configuration for a message, cut to 200 characters; a deeply nested one is only named."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
