"""The dense exchange: one AllReduce of everything in float32."""

from typing import Tuple

from mindspore import Tensor

from mindlora.training.exchange.exchange import Exchange
from mindlora.training.exchange.ranks import Ranks
from mindlora.training.exchange.traffic import FLOAT32, all_reduce


class DenseExchange(Exchange):
    """Sums the whole vector in one AllReduce, and not each parameter in one of its own.

    Args:
        size (int): Elements of the flat vector.
        ranks (Ranks): The group of this rank.
    """

    def __init__(self, size: int, ranks: Ranks):
        super().__init__()
        self.size, self.ranks = size, ranks
        self.all_reduce = ranks.all_reduce()

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        return self.all_reduce(flat), self.nothing

    def bytes_at(self, step: int) -> int:
        return all_reduce(FLOAT32 * self.size, self.ranks)
