"""The exchange over machines: dense inside of each, where links are fast, and any other exchange between them."""

from typing import Callable, List, Optional, Tuple

from mindspore import Parameter, Tensor, ops
from mindspore.communication import create_group

from mindlora.training.exchange.exchange import Exchange
from mindlora.training.exchange.ranks import Ranks


class TwoLevelExchange(Exchange):
    """Sums over the ranks of a machine, then over the machines.

    Every rank of a machine sums one part of the vector, as many as the machine has ranks, with the ranks of the same
    number on the other machines; then the machine's ranks put the parts together. ``between`` exchanges this rank's
    part, of part_size(size, within) elements.
    """

    def __init__(self, size: int, within: Ranks, between: Exchange):
        super().__init__()
        self.size = size
        self.within = within
        self.between = between
        self.part = part_size(size, within)
        self.start = within.rank * self.part
        self.padded = self.part * within.count
        self.sum_machine = within.all_reduce()
        self.put_together = within.all_reduce()

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        machine = self.sum_machine(flat)
        padded = ops.pad(machine, (0, self.padded - self.size))
        total, residual = self.between.reduce(padded[self.start : self.start + self.part])
        parts = self.put_together(ops.pad(total, (self.start, self.padded - self.start - self.part)))
        return parts[: self.size], residual

    def keep(self, residual: Tensor) -> Tensor:
        return self.between.keep(residual)

    @property
    def bytes_per_step(self) -> int:
        inside = self.within.bytes_to_sum(self.size) + self.within.bytes_to_sum(self.padded)
        return inside + self.between.bytes_per_step

    @property
    def bytes_between_machines(self) -> int:
        return self.between.bytes_per_step

    def unsent(self) -> Optional[Parameter]:
        return self.between.unsent()


def part_size(size: int, within: Ranks) -> int:
    """Returns how many elements of the vector each rank of a machine exchanges with other machines."""
    return -(-size // within.count)


def machine_groups(
    ranks: Ranks, local_size: int, make_group: Optional[Callable[[str, List[int]], None]] = None
) -> Tuple[Ranks, Ranks]:
    """Returns the ranks of this rank's machine, and those with the same number on every machine.

    The ranks of a machine follow each other. ``make_group`` gets (name, ranks) of both groups; None stands for
    MindSpore's create_group.
    """
    machine, number = divmod(ranks.rank, local_size)
    machines = ranks.count // local_size
    names = f"exchange_machine_{machine}", f"exchange_number_{number}"
    members = (
        [machine * local_size + i for i in range(local_size)],
        [number + i * local_size for i in range(machines)],
    )
    for name, group in zip(names, members):
        (make_group or create_group)(name, group)
    return Ranks(number, local_size, names[0]), Ranks(machine, machines, names[1])
