"""The exchange of the largest gradients alone, at positions that all ranks share, with error feedback."""

from typing import List, Sequence, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.training.exchange.bitmap import LargestAsBitmap, PositionsOfBitmap, words_of
from mindlora.training.exchange.exchange import RESIDUAL_NAME, Exchange
from mindlora.training.exchange.layout import Span
from mindlora.training.exchange.ranks import Ranks
from mindlora.training.exchange.traffic import FLOAT32, all_reduce

STEP_NAME = "gradient_exchange_step"


class TopKExchange(Exchange):
    """Sums k elements of the vector, those that one rank finds the largest, and the protected ones.

    With c = gradient + residual, the chooser of step t, rank t mod n, marks the k largest |c| in a bitmap. All ranks
    sum their c at these positions; the sum is 0 elsewhere. What a rank has not sent stays in its residual (error
    feedback): c = sent + residual, exactly. Positions of one rank for all make the sum k values for any number of
    ranks, where positions of their own would have to be sent by each to all.

    The bitmap is one AllReduce in which all ranks but the chooser take part with zeros: size/24 float32. A Broadcast
    would be a third of the bytes in all, but its root would send them n - 1 times, and on CPUs it knows no groups.

    Args:
        size (int): Elements of the flat vector.
        ranks (Ranks): The group of this rank.
        stages (Sequence): (first step, density) of each stage; density 1 is the dense exchange.
        protected (Sequence[Span]): Parts of the vector that are sent whole. Default: none.
        feedback (bool): Whether what was not sent is kept; only a comparison switches it off. Default: True.
    """

    def __init__(
        self,
        size: int,
        ranks: Ranks,
        stages: Sequence[Tuple[int, float]],
        protected: Sequence[Span] = (),
        feedback: bool = True,
    ):
        super().__init__()
        self.size, self.ranks, self.feedback = size, ranks, feedback
        self.pieces = pieces(size, protected)
        self.open_size = sum(end - start for start, end, is_protected in self.pieces if not is_protected)
        self.starts = [start for start, _ in stages]
        self.counts = [max(1, round(density * self.open_size)) for _, density in stages]
        self.sums = nn.CellList([ChosenSum(self.open_size, k, ranks) for k in self.counts if k < self.open_size])
        # The stages whose density is 1 come first, and have no cell.
        self.dense_stages = len(stages) - len(self.sums)
        self.all_reduce = ranks.all_reduce()
        self.step = Parameter(Tensor(0, mstype.int32), name=STEP_NAME, requires_grad=False)
        # x + -0.0 is x for every x, 0.0 + -0.0 would not be -0.0: so density 1 sends the gradient's very bits.
        self.residual = Parameter(
            Tensor(np.full(max(1, self.open_size), -0.0, np.float32)), name=RESIDUAL_NAME, requires_grad=False
        )

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        if self.open_size == 0:
            return self.all_reduce(flat), self.nothing
        corrected, whole = self.split(flat)
        corrected = corrected + self.residual
        if not self.sums:
            return self.all_reduce(self.join(corrected, whole)), ops.full_like(corrected, -0.0)
        total, residual = flat, corrected
        if self.dense_stages and self.step < self.starts[self.dense_stages]:
            total, residual = self.all_reduce(self.join(corrected, whole)), ops.full_like(corrected, -0.0)
        for number in range(len(self.sums)):
            if self.is_stage(number + self.dense_stages):
                is_chooser = (self.step % self.ranks.count == self.ranks.rank).astype(mstype.float32)
                chosen, whole_sum, residual = self.sums[number](corrected, whole, is_chooser)
                total = self.join(chosen, whole_sum)
        return total, residual

    def keep(self, residual: Tensor) -> Tensor:
        if self.feedback and self.open_size:
            ops.assign(self.residual, residual)
        return ops.assign_add(self.step, Tensor(1, mstype.int32))

    def is_stage(self, number: int) -> Tensor:
        """Returns whether the step belongs to a stage: bool []."""
        begun = self.step >= self.starts[number]
        if number + 1 == len(self.starts):
            return begun
        return ops.logical_and(begun, self.step < self.starts[number + 1])

    def split(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the open part of the vector, and the protected one (one element of 0 if there is none)."""
        opened, whole = (), ()
        for start, end, is_protected in self.pieces:
            if is_protected:
                whole += (flat[start:end],)
            else:
                opened += (flat[start:end],)
        return ops.cat(opened), ops.cat(whole) if whole else self.nothing

    def join(self, opened: Tensor, whole: Tensor) -> Tensor:
        """Returns the vector of an open and a protected part."""
        parts, open_at, whole_at = (), 0, 0
        for start, end, is_protected in self.pieces:
            length = end - start
            if is_protected:
                parts += (whole[whole_at : whole_at + length],)
                whole_at += length
            else:
                parts += (opened[open_at : open_at + length],)
                open_at += length
        return ops.cat(parts)

    def bytes_at(self, step: int) -> int:
        k = self.counts[max(number for number, start in enumerate(self.starts) if start <= step)]
        if k >= self.open_size:
            return all_reduce(FLOAT32 * self.size, self.ranks)
        sent = max(1, self.size - self.open_size) + k
        return all_reduce(FLOAT32 * words_of(self.open_size), self.ranks) + all_reduce(FLOAT32 * sent, self.ranks)

    def steps_done(self) -> int:
        return int(self.step.asnumpy())

    def unsent(self) -> Parameter:
        return self.residual


class ChosenSum(nn.Cell):
    """One stage of TopKExchange.

    Args:
        size (int): Elements to choose from.
        k (int): How many to send.
        ranks (Ranks): The group of this rank.

    Inputs:
        - **corrected** (Tensor) - Gradient + residual, float32 [size].
        - **whole** (Tensor) - What is sent whole, float32 [W].
        - **is_chooser** (Tensor) - 1 on the rank that chooses, else 0, float32 [].

    Outputs:
        Tuple of three: the sum at the chosen positions and 0 elsewhere [size], the sum of ``whole`` [W], the residual.
    """

    def __init__(self, size: int, k: int, ranks: Ranks):
        super().__init__(auto_prefix=False)
        self.k = k
        self.bitmap, self.positions = LargestAsBitmap(size, k), PositionsOfBitmap(k)
        self.sum_bitmap, self.sum_values = ranks.all_reduce(), ranks.all_reduce()

    def construct(self, corrected: Tensor, whole: Tensor, is_chooser: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        positions = self.positions(self.sum_bitmap(self.bitmap(corrected) * is_chooser))
        sent = ops.gather(corrected, positions, 0)
        sums = self.sum_values(ops.cat((sent, whole)))
        zeros = ops.zeros_like(corrected)
        chosen = ops.tensor_scatter_elements(zeros, positions, sums[: self.k])
        return chosen, sums[self.k :], ops.tensor_scatter_elements(corrected, positions, zeros[: self.k])


def pieces(size: int, protected: Sequence[Span]) -> List[Tuple[int, int, bool]]:
    """Returns the parts (start, end, is protected) of a vector, in order; those of ``protected`` are disjoint."""
    found, at = [], 0
    for start, end in sorted(protected):
        found += [(at, start, False), (start, end, True)]
        at = end
    return [(start, end, is_protected) for start, end, is_protected in [*found, (at, size, False)] if start < end]
