"""The exchange in float16: half the bytes, with a scale at which nothing overflows."""

from typing import Tuple

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype

from mindlora.training.exchange.exchange import Exchange
from mindlora.training.exchange.ranks import Ranks
from mindlora.training.exchange.traffic import FLOAT16, FLOAT32, all_reduce

# A sum of at most 2 ** 15 leaves room for the rounding of every addend below float16's largest number, 65504.
_LARGEST_EXPONENT = 14


class Float16Exchange(Exchange):
    """Sums the vector in float16: sum = AllReduce(float16(s flat)) / s.

    s is a power of two, the same on all ranks. It follows from m, the sum over the ranks of their largest absolute
    values, which is a first AllReduce of one number: s m is in [2 ** 14, 2 ** 15). No partial sum of any element
    exceeds m, so neither the cast nor the sum can overflow, and small gradients do not vanish. Where the gradient of a
    rank is not finite, the sum is not finite on any rank.

    Args:
        size (int): Elements of the flat vector.
        ranks (Ranks): The group of this rank.
    """

    def __init__(self, size: int, ranks: Ranks):
        super().__init__()
        self.size, self.ranks = size, ranks
        self.all_reduce, self.all_reduce_largest = ranks.all_reduce(), ranks.all_reduce()
        self.smallest = Tensor(2.0**-100, mstype.float32)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        largest = self.all_reduce_largest(ops.abs(flat).max().reshape(1))
        exponent = ops.floor(ops.log2(ops.maximum(largest, self.smallest)))
        scale = ops.pow(2.0, _LARGEST_EXPONENT - exponent)
        return self.all_reduce((flat * scale).astype(mstype.float16)).astype(mstype.float32) / scale, self.nothing

    def bytes_at(self, step: int) -> int:
        return all_reduce(FLOAT16 * self.size, self.ranks) + all_reduce(FLOAT32, self.ranks)
