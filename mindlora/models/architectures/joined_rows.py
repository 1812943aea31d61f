"""How the rows of several weights are ordered in a joined one (MindFormers' qkv_concat).

A joined weight consists of equal groups. Each group holds some rows of the first part, then some of the second, and so
on. The layouts differ in what a group is.
"""

from typing import NamedTuple, Optional, Sequence, Tuple

import numpy as np


def join_rows(parts: Sequence[np.ndarray], groups: int) -> np.ndarray:
    """Returns the joined rows of ``parts``, each of shape [groups * the part's rows in a group, ...]."""
    by_group = [part.reshape((groups, len(part) // groups) + part.shape[1:]) for part in parts]
    return np.concatenate(by_group, axis=1).reshape((-1,) + parts[0].shape[1:])


def split_rows(joined: np.ndarray, sizes: Sequence[int]) -> Tuple[np.ndarray, ...]:
    """Returns the rows of each part: the inverse of join_rows.

    ``sizes`` are the rows of each part in a group, so ``joined`` is of shape [groups * sum(sizes), ...].
    """
    by_group = joined.reshape((-1, sum(sizes)) + joined.shape[1:])
    ends = np.cumsum(sizes)
    blocks = [by_group[:, end - size : end] for size, end in zip(sizes, ends)]
    return tuple(np.ascontiguousarray(block.reshape((-1,) + joined.shape[1:])) for block in blocks)


class HeadSizes(NamedTuple):
    """The sizes of a model that separate the rows of a joined weight's parts; None for unknown sizes.

    The number of heads must agree with head_dim; ``first`` counts the rows of the first part, if a layout needs_first.
    """

    heads: Optional[int] = None
    kv_heads: Optional[int] = None
    head_dim: Optional[int] = None
    first: Optional[int] = None


NO_SIZES = HeadSizes()


class RowLayout:
    """The groups of one kind of joined weight, and the sizes of the model that separate its rows."""

    needs_heads = False
    needs_first = False

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        """Returns the number of groups in the weight that joins parts of ``rows``, or None if they cannot be joined."""
        raise NotImplementedError

    def sizes(self, total: int, model: HeadSizes = NO_SIZES) -> Optional[Tuple[int, ...]]:
        """Returns the rows of each part in a group of a weight of ``total`` rows, or None if it cannot be divided."""
        raise NotImplementedError

    def complete(self, rows: Sequence[Optional[int]], total: int) -> Optional[Tuple[int, ...]]:
        """Returns the rows of all parts of a joined weight with ``total`` rows, or None if no such weight exists.

        In ``rows``, None stands for unknown numbers; at least one is known.
        """
        raise NotImplementedError

    def total(
        self, rows: Sequence[Optional[int]], heads: Optional[int], kv_heads: Optional[int], head_dim: Optional[int]
    ) -> Optional[int]:
        """Returns the rows of the joined weight, or None if a part's rows are unknown.

        Unknown sizes and items of ``rows`` are None; at least one item is known.
        """
        raise NotImplementedError

    def head_dim(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        """Returns the rows of one head, given the rows of each part; None for layouts without heads."""
        return None


class EqualParts(RowLayout):
    """All parts, of which there are ``parts``, have equal numbers of rows."""

    def __init__(self, parts: int = 2):
        self._parts = parts

    def complete(self, rows: Sequence[Optional[int]], total: int) -> Optional[Tuple[int, ...]]:
        share, rest = divmod(total, self._parts)
        fits = not rest and share >= 1 and all(count in (None, share) for count in rows)
        return (share,) * self._parts if fits else None

    def total(
        self, rows: Sequence[Optional[int]], heads: Optional[int], kv_heads: Optional[int], head_dim: Optional[int]
    ) -> Optional[int]:
        share = next((count for count in rows if count is not None), None)
        return None if share is None else self._parts * share


class RowsInTurn(EqualParts):
    """A group is one row of each part: row 0 of the first, row 0 of the second, row 1 of the first, ..."""

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return rows[0] if len(set(rows)) == 1 else None

    def sizes(self, total: int, model: HeadSizes = NO_SIZES) -> Optional[Tuple[int, ...]]:
        return None if total % self._parts else (1,) * self._parts


class PartAfterPart(EqualParts):
    """There is one group: all rows of the first part, then all of the second, and so on."""

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return 1 if len(set(rows)) == 1 else None

    def sizes(self, total: int, model: HeadSizes = NO_SIZES) -> Optional[Tuple[int, ...]]:
        return self.complete((None,) * self._parts, total)


class UnequalPartAfterPart(RowLayout):
    """There is one group of two parts of different size: all rows of the first, then all of the second."""

    needs_first = True

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return 1

    def sizes(self, total: int, model: HeadSizes = NO_SIZES) -> Optional[Tuple[int, ...]]:
        return self.complete((model.first, None), total) if model.first else None

    def complete(self, rows: Sequence[Optional[int]], total: int) -> Optional[Tuple[int, ...]]:
        first, second = rows
        if first is None:
            first = total - (second or 0)
        if second is None:
            second = total - first
        return (first, second) if first + second == total and min(first, second) >= 1 else None

    def total(
        self, rows: Sequence[Optional[int]], heads: Optional[int], kv_heads: Optional[int], head_dim: Optional[int]
    ) -> Optional[int]:
        counts = [count for count in rows if count is not None]
        return sum(counts) if len(counts) == len(rows) else None


class RowsByKeyValueHead(RowLayout):
    """The parts are q, k and v, and a group is a key-value head: [heads of q that share it | k | v]."""

    needs_heads = True

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        fits = kv_heads and kv_heads > 0 and rows[1] == rows[2] and not any(count % kv_heads for count in rows)
        return kv_heads if fits else None

    def sizes(self, total: int, model: HeadSizes = NO_SIZES) -> Optional[Tuple[int, ...]]:
        heads, kv_heads, head_dim, _ = model
        if not kv_heads or kv_heads < 1 or total % kv_heads:
            return None
        if heads:
            # The rows decide, and not a head size: in many models that is not hidden_size / heads.
            rows_of_head, rest = divmod(total, heads + 2 * kv_heads)
            if rest or heads % kv_heads or head_dim not in (None, rows_of_head):
                return None
            head_dim = rows_of_head
        if not head_dim or head_dim < 1:
            return None
        q = total // kv_heads - 2 * head_dim
        return None if q < 1 or q % head_dim else (q, head_dim, head_dim)

    def complete(self, rows: Sequence[Optional[int]], total: int) -> Optional[Tuple[int, ...]]:
        q, k, v = rows
        key_value = v if k is None else k
        if key_value is None:
            key_value = (total - (q or 0)) // 2
        counts = (total - 2 * key_value if q is None else q, key_value, key_value if v is None else v)
        return counts if counts[1] == counts[2] and sum(counts) == total and min(counts) >= 1 else None

    def total(
        self, rows: Sequence[Optional[int]], heads: Optional[int], kv_heads: Optional[int], head_dim: Optional[int]
    ) -> Optional[int]:
        for count, heads_of_part in zip(rows, (heads, kv_heads, kv_heads)):
            if count and heads_of_part and not count % heads_of_part:
                head_dim = head_dim or count // heads_of_part
        q = rows[0] or (heads or 0) * (head_dim or 0)
        key_value = rows[1] or rows[2] or (kv_heads or 0) * (head_dim or 0)
        return q + 2 * key_value if q and key_value else None

    def head_dim(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return rows[1] // kv_heads if kv_heads else None


class QueryKeyValueInTurn(RowsByKeyValueHead):
    """The parts are q, k and v, and there is one group: all rows of q, then those of k, then those of v."""

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return 1 if rows[1] == rows[2] else None

    def sizes(self, total: int, model: HeadSizes = NO_SIZES) -> Optional[Tuple[int, ...]]:
        group = super().sizes(total, model)
        return tuple(size * (model.kv_heads or 0) for size in group) if group else None
