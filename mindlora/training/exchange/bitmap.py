"""A choice of positions as a bitmap, in float32 words that an AllReduce sums without losing a bit."""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

# float32 holds every whole number below 2 ** 24 exactly; a sum of one such number and zeros is exact in any order.
WORD_BITS = 24


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
