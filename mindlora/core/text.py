"""Parts of messages: lists of paths, the nearest known word, values that may be long."""

import difflib
import math
import re
import textwrap
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

# Command-line reports as text that is WIDTH characters wide: labeled lines, and tables.

WIDTH = 110


def fields(pairs: Iterable[Tuple[str, str]]) -> str:
    """Returns one line for each (name, text) pair, with the texts aligned."""
    pairs = list(pairs)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(wrapped(f"{name:<{width}}  ", text) for name, text in pairs)


def wrapped(head: str, text: str, width: int = WIDTH) -> str:
    """Returns ``head`` followed by ``text``, which is wrapped and indented after the first line."""
    # Paths and keys are not broken.
    lines = textwrap.wrap(text, width - len(head), break_long_words=False, break_on_hyphens=False)
    return (head + f"\n{' ' * len(head)}".join(lines)).rstrip()


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, the first column aligned to the left and all others to the right."""
    room = WIDTH - sum(2 + max(map(len, column)) for column in list(zip(titles, *rows))[1:])
    table = [[_ending(row[0], room), *row[1:]] for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for first, *rest in table:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:])]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def number(value: Optional[float]) -> str:
    """Returns whole numbers and those of 10,000 to a billion in full, others with four digits, and - for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() or 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _ending(text: str, room: int) -> str:
    # The end of a path says more than its beginning.
    return text if len(text) <= room else f"...{text[3 - room :]}"


# One of two words may be a misspelling of the other if they share this much of their letters, and this much of those
# of the pieces in which they differ; if they share almost all, it is.
_NEAR, _NEAR_PIECES, _ALMOST_EQUAL = 0.6, 0.65, 0.9
# How many words with much in common are compared piece by piece.
_COMPARED = 20
# The words and numbers that make up a name, in CamelCase or separated in any way.
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def listed(paths: Iterable[str]) -> str:
    """Returns paths as text for a message; those that differ only in numbers are combined."""
    return ", ".join(collapse_numbers(list(paths)))


def examples(paths: Iterable[str]) -> str:
    """Returns the paths as ``listed`` does, but at most four entries and the number of the rest."""
    lines = collapse_numbers(list(paths))
    return ", ".join(lines[:4]) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")


def first_ten(names: Sequence[str]) -> str:
    """Returns the first ten names and whether there are more, or "nothing"."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") if names else "nothing"


def collapse_numbers(paths: List[str]) -> List[str]:
    """Combines paths that differ only in numbers into one, such as ``layers.{0..31}.wq``."""
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
    """Returns the end of an error message: the nearest known word if one is near, and all known words."""
    near = near_word(word, known)
    meant = f" Did you mean '{near}'?" if near else ""
    return f"{meant} Known: {', '.join(sorted(known))}."


def near_word(word: str, known: Iterable[str]) -> Optional[str]:
    """Returns the nearest known word of which ``word`` may be a misspelling, or None."""
    spellings = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), spellings, n=_COMPARED, cutoff=_NEAR)
    return next((spellings[each] for each in near if _differ_in_spelling(word, spellings[each])), None)


def _differ_in_spelling(word: str, other: str) -> bool:
    """Returns whether two words that have much in common differ only a little.

    A common ending that many names have says little: InternLMForCausalLM is not a misspelling of Qwen3ForCausalLM.
    Numbers tell versions apart: Qwen2 is not a misspelling of Qwen3.
    """
    if re.findall(r"\d+", word) != re.findall(r"\d+", other):
        return False
    first, second = _PIECES.findall(word), _PIECES.findall(other)
    for end in (0, -1):
        while first and second and first[end].lower() == second[end].lower():
            del first[end], second[end]
    if not first and not second:
        return True
    if not first or not second:
        # One has a whole word more: rank is short for lora_rank; Glm4Moe is another model than Glm4.
        shorter, longer = sorted((word.lower(), other.lower()), key=len)
        return longer.startswith(shorter) or longer.endswith(shorter)
    if difflib.SequenceMatcher(None, word.lower(), other.lower()).ratio() >= _ALMOST_EQUAL:
        return True
    return difflib.SequenceMatcher(None, "".join(first).lower(), "".join(second).lower()).ratio() >= _NEAR_PIECES


def shown(value: object) -> str:
    """Returns a value of a configuration for a message, cut to 200 characters; a deeply nested one is only named."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
