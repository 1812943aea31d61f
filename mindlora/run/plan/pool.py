"""MindSpore's pool of device memory: which block a tensor gets, and what of the blocks has ever been reached.

The rules are those of MindSpore's dynamic memory pool: a tensor gets the smallest hole that it fits into, and where it
fits into none, a block of 2 GiB (mindspore.runtime.set_memory: increase_size), or 4, 8 and so on if it is larger. Holes
beside each other in a block become one, and blocks are not given back. A block of 1 GiB is for parameters alone; those
that do not fit into it lie among the other tensors.
"""

import bisect
from typing import Dict, List, NamedTuple, Tuple

from mindlora.run.plan.units import GIB

_BLOCK = 2 * GIB
_OF_PARAMETERS = GIB
_ALIGNMENT = 512


class Piece(NamedTuple):
    """A piece of a block: where it begins, and its bytes."""

    block: int
    begin: int
    size: int


class MemoryPool:
    """A pool from which tensors are taken, and to which they are given back.

    Attributes:
        used (int): Bytes of the tensors that are held.
        used_peak (int): The most that this was: MindSpore's "used peak memory usage (without fragments)".
    """

    def __init__(self) -> None:
        self.used = self.used_peak = 0
        self._parameters = 0
        self._reached: List[int] = []
        # The holes by their size, by where they begin and by where they end.
        self._by_size: List[Tuple[int, int, int]] = []
        self._beginning: Dict[Tuple[int, int], Piece] = {}
        self._ending: Dict[Tuple[int, int], Piece] = {}

    @property
    def actual_peak(self) -> int:
        """How far into its blocks tensors have reached: MindSpore's "actual peak memory usage (with fragments)"."""
        return self._parameters + sum(self._reached)

    def keep(self, size: int) -> None:
        """Takes what a parameter of ``size`` bytes needs, which is never given back."""
        size = _aligned(size)
        if self._parameters + size > _OF_PARAMETERS:
            self.take(size)
        else:
            self._parameters += size
            self._hold(size)

    def take(self, size: int) -> Piece:
        """Returns a piece for a tensor of ``size`` bytes."""
        size = _aligned(size)
        position = bisect.bisect_left(self._by_size, (size,))
        if position < len(self._by_size):
            hole_size, newest, begin = self._by_size[position]
            hole = Piece(-newest, begin, hole_size)
            self._remove(hole)
        else:
            hole = self._new_block(size)
        if hole.size > size:
            self._add(Piece(hole.block, hole.begin + size, hole.size - size))
        self._reached[hole.block] = max(self._reached[hole.block], hole.begin + size)
        self._hold(size)
        return Piece(hole.block, hole.begin, size)

    def give_back(self, piece: Piece) -> None:
        """Takes a piece back, and joins it with the holes beside it."""
        block, begin, size = piece
        self.used -= size
        before = self._ending.get((block, begin))
        after = self._beginning.get((block, begin + size))
        for hole in (before, after):
            if hole is not None:
                self._remove(hole)
                size += hole.size
        self._add(Piece(block, begin if before is None else before.begin, size))

    def _hold(self, size: int) -> None:
        self.used += size
        self.used_peak = max(self.used_peak, self.used)

    def _new_block(self, size: int) -> Piece:
        block = _BLOCK
        while block < size:
            block *= 2
        self._reached.append(0)
        return Piece(len(self._reached) - 1, 0, block)

    def _add(self, hole: Piece) -> None:
        # Among equal holes, the one at the lowest address is taken: that of the newest block, which lies lowest.
        bisect.insort(self._by_size, (hole.size, -hole.block, hole.begin))
        self._beginning[hole.block, hole.begin] = hole
        self._ending[hole.block, hole.begin + hole.size] = hole

    def _remove(self, hole: Piece) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (hole.size, -hole.block, hole.begin))]
        del self._beginning[hole.block, hole.begin]
        del self._ending[hole.block, hole.begin + hole.size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
