"""Fewer cases than all of some values with all of others, for what each value alone, or each pair, can break."""

from typing import Any, List, Sequence, Tuple

from tests.support.native import DTYPES


def each_once(first: Sequence, second: Sequence) -> List[Tuple[Any, Any]]:
    """Returns pairs in which each value of both occurs; the shorter begins again where it ends."""
    count = max(len(first), len(second))
    return [(first[index % len(first)], second[index % len(second)]) for index in range(count)]


def pairs_with(sizes: Sequence[Tuple], kinds: Sequence) -> List[Tuple]:
    """Returns (dtype, *size, kind): each dtype with each size, and each of two kinds with each dtype and each size."""
    cases = []
    for row, dtype in enumerate(DTYPES):
        for column, size in enumerate(sizes):
            cases.append((dtype, *size, kinds[(row + column) % len(kinds)]))
    return cases
