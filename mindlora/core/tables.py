"""Command-line reports as text that is WIDTH characters wide: labeled lines, and tables."""

import textwrap
from typing import Iterable, Optional, Sequence, Tuple

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
    """Returns a whole number in full, any other with four significant digits, and - for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def _ending(text: str, room: int) -> str:
    # The end of a path says more than its beginning.
    return text if len(text) <= room else f"...{text[3 - room :]}"
