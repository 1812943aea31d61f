"""The exchange of the largest gradients alone, at positions that all ranks share, with error feedback."""

import math
import re
from typing import List, Optional, Sequence, Set, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.errors import ConfigError
from mindlora.models.names import layer_of
from mindlora.training.exchange.exchange import RESIDUAL_NAME, WORD_BITS, Exchange, Span
from mindlora.training.exchange.ranks import Ranks

STEP_NAME = "gradient_exchange_step"
# How much the density falls from one stage to the next.
_RATIO = 4


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
            return self.ranks.bytes_to_sum(self.size)
        sent = max(1, self.size - self.open_size) + k
        return self.ranks.bytes_to_sum(words_of(self.open_size)) + self.ranks.bytes_to_sum(sent)

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


def words_of(size: int) -> int:
    """Returns how many words the bitmap of ``size`` positions takes."""
    return -(-size // WORD_BITS)


class LargestAsBitmap(nn.Cell):
    """The bitmap of the k elements of a vector with the largest absolute values.

    NaN and infinity count as 0. Bit i % 24 of word i // 24 belongs to element i.

    Args:
        size (int): Elements of the vector.
        k (int): How many to choose.

    Inputs:
        - **vector** (Tensor) - float32 [size].

    Outputs:
        float32 [words_of(size)], whole numbers below 2 ** 24.
    """

    def __init__(self, size: int, k: int):
        super().__init__(auto_prefix=False)
        self.k, self.padded = k, words_of(size) * WORD_BITS
        self.top_k = ops.TopK(sorted=False)
        self.powers = Tensor(2.0 ** np.arange(WORD_BITS), mstype.float32)
        self.ones = Tensor(np.ones(k), mstype.float32)

    def construct(self, vector: Tensor) -> Tensor:
        size = ops.select(ops.isfinite(vector), ops.abs(vector), ops.zeros_like(vector))
        _, chosen = self.top_k(size, self.k)
        bits = ops.tensor_scatter_elements(ops.zeros((self.padded,), mstype.float32), chosen, self.ones)
        return (bits.reshape(-1, WORD_BITS) * self.powers).sum(-1)


class PositionsOfBitmap(nn.Cell):
    """The positions that a bitmap holds, in ascending order: the j-th is where the running count of bits reaches j.

    Args:
        k (int): How many bits are set.

    Inputs:
        - **words** (Tensor) - float32 [words], as LargestAsBitmap gives them.

    Outputs:
        int32 [k].
    """

    def __init__(self, k: int):
        super().__init__(auto_prefix=False)
        self.running_count = ops.CumSum()
        self.powers = Tensor(1 << np.arange(WORD_BITS), mstype.int32)
        self.numbers = Tensor(np.arange(1, k + 1), mstype.int32)

    def construct(self, words: Tensor) -> Tensor:
        bits = ops.bitwise_and(words.astype(mstype.int32).expand_dims(-1), self.powers) != 0
        counts = self.running_count(bits.reshape(-1).astype(mstype.int32), 0)
        return ops.searchsorted(counts, self.numbers).astype(mstype.int32)


def density_stages(density: float, warmup_steps: int) -> List[Tuple[int, float]]:
    """Returns the stages (first step, density): 1, 1/4, 1/16 ... as long as that is above ``density``, then this.

    The stages of the warm-up share ``warmup_steps`` as evenly as whole steps allow. Few stages, as every one has shapes
    of its own, for which a branch of the graph is compiled at the start; none is compiled later. (Warm-up from Deep
    Gradient Compression, Lin et al. 2018, whose density falls by 4 in each epoch.)

    Args:
        density (float): The share of the elements that is sent after the warm-up, in (0, 1].
        warmup_steps (int): Steps of the warm-up; 0 for none.

    Returns:
        list of (int, float), the first one from step 0.
    """
    count = math.ceil(round(math.log(1 / density, _RATIO), 9))
    if not warmup_steps or not count:
        return [(0, density)]
    stages = {warmup_steps * number // count: float(_RATIO) ** -number for number in range(count)}
    return [*stages.items(), (warmup_steps, density)]


def protected_names(names: Sequence[str], patterns: Optional[Sequence[str]]) -> Set[str]:
    """Returns the names of the parameters to send whole.

    Args:
        names (Sequence[str]): Names of all trained parameters.
        patterns (Sequence[str]): Regular expressions for whole names; None for those of the first and the last layer,
            and those outside the adapters, which modules_to_save brings.

    Raises:
        ConfigError: A pattern is wrong or matches nothing, or nothing is left to compress.
    """
    found = _by_default(names) if patterns is None else set().union(*(_matching(names, p) for p in patterns))
    if len(found) == len(set(names)):
        raise ConfigError(
            f"gradient_exchange: protect leaves none of the {len(names)} trained parameters to compress "
            f"(by default it names the first and the last layer). Set protect: [], or use type dense."
        )
    return found


def _by_default(names):
    numbers = [number for number in map(layer_of, names) if number is not None]
    ends = {min(numbers), max(numbers)} if numbers else set()
    return {name for name in names if layer_of(name) in ends or "mindpet_delta_lora" not in name}


def _matching(names, pattern):
    try:
        found = {name for name in names if re.fullmatch(pattern, name)}
    except re.error as error:
        raise ConfigError(
            f"gradient_exchange: protect has {pattern!r}, which is no regular expression: {error}."
        ) from error
    if not found:
        raise ConfigError(
            f"gradient_exchange: protect has {pattern!r}, which matches no trained parameter, such as {names[0]}."
        )
    return found
