"""How the rows of several weights are ordered in a joined one (MindFormers' qkv_concat).

A joined weight consists of equal groups. Each group holds some rows of the first part, then some of the second, and so
on. The layouts differ in what a group is.
"""

from typing import Optional, Sequence, Tuple

import numpy as np


def join_rows(parts: Sequence[np.ndarray], groups: int) -> np.ndarray:
    """Returns the joined rows of ``parts``.

    Args:
        parts (list of array): Each of shape [groups * the part's rows in a group, ...].
        groups (int): Number of groups.

    Returns:
        array of shape [sum of the parts' rows, ...].
    """
    by_group = [part.reshape((groups, len(part) // groups) + part.shape[1:]) for part in parts]
    return np.concatenate(by_group, axis=1).reshape((-1,) + parts[0].shape[1:])


def split_rows(joined: np.ndarray, sizes: Sequence[int]) -> Tuple[np.ndarray, ...]:
    """Returns the rows of each part: the reverse of join_rows.

    Args:
        joined (array): Shape [groups * sum(sizes), ...].
        sizes (list of int): Rows of each part in a group.
    """
    by_group = joined.reshape((-1, sum(sizes)) + joined.shape[1:])
    ends = np.cumsum(sizes)
    blocks = [by_group[:, end - size : end] for size, end in zip(sizes, ends)]
    return tuple(np.ascontiguousarray(block.reshape((-1,) + joined.shape[1:])) for block in blocks)


class RowLayout:
    """What a group is in one kind of joined weight.

    Attributes:
        needs_heads (bool): Whether the rows can only be told apart with the model's numbers of heads.
        needs_first (bool): Whether they can only be told apart with the number of rows of the first part.
    """

    needs_heads = False
    needs_first = False

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        """Returns the number of groups in the joined weight, or None if the parts cannot be joined.

        Args:
            rows (list of int): Rows of each part.
            kv_heads (int): Number of key-value heads, or None.
        """
        raise NotImplementedError

    def sizes(
        self,
        total: int,
        kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        heads: Optional[int] = None,
        first: Optional[int] = None,
    ) -> Optional[Tuple[int, ...]]:
        """Returns the rows of each part in one group of a joined weight, or None if it cannot be divided into groups.

        Args:
            total (int): Rows of the joined weight.
            kv_heads (int): Number of key-value heads. Default: None.
            head_dim (int): Rows of one head. Default: None, which takes it from ``heads``.
            heads (int): Number of attention heads, with which ``head_dim`` has to agree. Default: None.
            first (int): Rows of the first part, for a layout that needs_first. Default: None.
        """
        raise NotImplementedError

    def complete(self, rows: Sequence[Optional[int]], total: int) -> Optional[Tuple[int, ...]]:
        """Returns the rows of all parts of a joined weight with ``total`` rows, or None if there is no such weight.

        Args:
            rows (list of int): Rows of each part, None for those to be found; at least one is known.
            total (int): Rows of the joined weight.
        """
        raise NotImplementedError

    def total(
        self, rows: Sequence[Optional[int]], heads: Optional[int], kv_heads: Optional[int], head_dim: Optional[int]
    ) -> Optional[int]:
        """Returns the rows of the joined weight, or None if those of a part are not known.

        Args:
            rows (list of int): Rows of each part, None if not known; at least one is known.
            heads, kv_heads, head_dim (int): The model's numbers of attention and of key-value heads, and the rows of
                one head; None if not known.
        """
        raise NotImplementedError

    def head_dim(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        """Returns the rows of one head, given the rows of each part; None if heads do not matter."""
        raise NotImplementedError


class RowsInTurn(RowLayout):
    """A group is one row of each part: row 0 of the first, row 0 of the second, row 1 of the first, ..."""

    def __init__(self, parts: int):
        self._parts = parts

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return rows[0] if len(set(rows)) == 1 else None

    def sizes(
        self,
        total: int,
        kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        heads: Optional[int] = None,
        first: Optional[int] = None,
    ) -> Optional[Tuple[int, ...]]:
        return None if total % self._parts else (1,) * self._parts

    def complete(self, rows: Sequence[Optional[int]], total: int) -> Optional[Tuple[int, ...]]:
        share, rest = divmod(total, self._parts)
        fits = not rest and share >= 1 and all(count in (None, share) for count in rows)
        return (share,) * self._parts if fits else None

    def total(
        self, rows: Sequence[Optional[int]], heads: Optional[int], kv_heads: Optional[int], head_dim: Optional[int]
    ) -> Optional[int]:
        known = [count for count in rows if count is not None]
        return self._parts * known[0] if known else None

    def head_dim(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return None


class RowsByKeyValueHead(RowLayout):
    """The parts are q, k and v, and a group is a key-value head: [heads of q that share it | k | v]."""

    needs_heads = True

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        fits = kv_heads and kv_heads > 0 and rows[1] == rows[2] and not any(count % kv_heads for count in rows)
        return kv_heads if fits else None

    def sizes(
        self,
        total: int,
        kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        heads: Optional[int] = None,
        first: Optional[int] = None,
    ) -> Optional[Tuple[int, ...]]:
        if not kv_heads or kv_heads < 1 or total % kv_heads:
            return None
        if heads:
            # The rows tell, whatever is said of the head size: of many models it is not hidden_size / heads.
            own, rest = divmod(total, heads + 2 * kv_heads)
            if rest or heads % kv_heads or head_dim not in (None, own):
                return None
            head_dim = own
        if not head_dim or head_dim < 1:
            return None
        q = total // kv_heads - 2 * head_dim
        return None if q < 1 or q % head_dim else (q, head_dim, head_dim)

    def complete(self, rows: Sequence[Optional[int]], total: int) -> Optional[Tuple[int, ...]]:
        q, k, v = rows
        key_value = v if k is None else k
        if key_value is None:
            key_value = (total - (q or 0)) // 2
        found = (total - 2 * key_value if q is None else q, key_value, key_value if v is None else v)
        return found if found[1] == found[2] and sum(found) == total and min(found) >= 1 else None

    def total(
        self, rows: Sequence[Optional[int]], heads: Optional[int], kv_heads: Optional[int], head_dim: Optional[int]
    ) -> Optional[int]:
        for count, own in ((rows[0], heads), (rows[1], kv_heads), (rows[2], kv_heads)):
            if count and own and not count % own:
                head_dim = head_dim or count // own
        q = rows[0] or (heads or 0) * (head_dim or 0)
        key_value = rows[1] or rows[2] or (kv_heads or 0) * (head_dim or 0)
        return q + 2 * key_value if q and key_value else None

    def head_dim(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return rows[1] // kv_heads if kv_heads else None


class PartAfterPart(RowLayout):
    """There is one group: all rows of the first part, then all of the second.

    Args:
        parts (int): How many parts there are. Default: 2.
        equal (bool): Whether they have equal numbers of rows; if not, those of the first have to be given. Default:
            True.
    """

    def __init__(self, parts: int = 2, equal: bool = True):
        self._parts, self._equal, self.needs_first = parts, equal, not equal

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return 1 if len(set(rows)) == 1 or not self._equal else None

    def sizes(
        self,
        total: int,
        kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        heads: Optional[int] = None,
        first: Optional[int] = None,
    ) -> Optional[Tuple[int, ...]]:
        if self._equal:
            return None if total % self._parts else (total // self._parts,) * self._parts
        return (first, total - first) if first and 0 < first < total else None

    def complete(self, rows: Sequence[Optional[int]], total: int) -> Optional[Tuple[int, ...]]:
        if self._equal:
            return RowsInTurn(self._parts).complete(rows, total)
        first, second = rows
        found = (total - (second or 0) if first is None else first, total - (first or 0) if second is None else second)
        return found if sum(found) == total and min(found) >= 1 else None

    def total(
        self, rows: Sequence[Optional[int]], heads: Optional[int], kv_heads: Optional[int], head_dim: Optional[int]
    ) -> Optional[int]:
        known = [count for count in rows if count is not None]
        if self._equal:
            return self._parts * known[0] if known else None
        return sum(known) if len(known) == len(rows) else None

    def head_dim(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return None


class QueryKeyValueInTurn(RowsByKeyValueHead):
    """The parts are q, k and v, and there is one group: all rows of q, then those of k, then those of v."""

    def groups(self, rows: Sequence[int], kv_heads: Optional[int]) -> Optional[int]:
        return 1 if rows[1] == rows[2] else None

    def sizes(
        self,
        total: int,
        kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        heads: Optional[int] = None,
        first: Optional[int] = None,
    ) -> Optional[Tuple[int, ...]]:
        found = super().sizes(total, kv_heads, head_dim, heads)
        return tuple(size * (kv_heads or 0) for size in found) if found else None
