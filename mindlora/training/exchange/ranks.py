"""The ranks that exchange gradients with each other."""

from dataclasses import dataclass
from typing import Optional

from mindspore import ops


@dataclass(frozen=True)
class Ranks:
    """A group of ranks, as one of them sees it.

    Args:
        rank (int): This rank's number in the group, from 0.
        count (int): How many ranks the group has.
        group (str): The name of a communication group; None for all ranks. Default: None.
    """

    rank: int
    count: int
    group: Optional[str] = None

    def all_reduce(self) -> ops.AllReduce:
        """Returns an operator that sums a tensor over the group."""
        return ops.AllReduce(ops.ReduceOp.SUM, self.group) if self.group else ops.AllReduce()

    def broadcast(self, root: int) -> ops.Broadcast:
        """Returns an operator that gives every rank of the group the tensors of rank ``root`` of the group."""
        return ops.Broadcast(root, self.group) if self.group else ops.Broadcast(root)
