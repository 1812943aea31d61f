"""The dense exchange: one AllReduce of everything in float32."""

from typing import Tuple

from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.training.exchange.layout import FlatLayout
from mindlora.training.exchange.ranks import Ranks
from mindlora.training.exchange.traffic import FLOAT32, all_reduce


class DenseExchange(nn.Cell):
    """Sums the flat gradients of all ranks in one AllReduce. Every other exchange has the same methods.

    Args:
        layout (FlatLayout): The layout of the flat vector.
        ranks (Ranks): This rank and the group that it exchanges with.
    """

    def __init__(self, layout: FlatLayout, ranks: Ranks):
        super().__init__(auto_prefix=False)
        self.layout, self.ranks = layout, ranks
        self.all_reduce = ranks.all_reduce()
        self.nothing = Tensor([0.0], mstype.float32)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the sum over the ranks, and what this rank has not sent; it changes nothing.

        Args:
            flat (Tensor): This rank's gradients, float32 [layout.size].

        Returns:
            tuple of Tensor: the sum, float32 [layout.size], the same on every rank; and the residual for keep, here
            empty of meaning, since all is sent.
        """
        return self.all_reduce(flat), self.nothing

    def keep(self, residual: Tensor) -> Tensor:
        """Keeps the residual of a step that was done, to be sent with later ones; not called for a skipped step."""
        return residual

    def bytes_per_step(self, step: int) -> int:
        """Returns how many bytes this rank sends in step ``step``, which counts the steps done from 0."""
        return all_reduce(self.layout.size * FLOAT32, self.ranks)
