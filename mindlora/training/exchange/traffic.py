"""How many bytes a collective operation makes a rank send.

The formulas count payload alone, by the algorithms of MindSpore's collective operations on CPUs: AllReduce as a ring
(each of n ranks sends 2 (n - 1) chunks of 1/n of the vector), Broadcast as n - 1 messages from its root.
"""

from mindlora.training.exchange.ranks import Ranks

FLOAT32, FLOAT16 = 4, 2
# On CPUs the receiver of a message sends the whole of it back as its receipt, so a network device counts twice as much.
CPU_RECEIPTS = 2


def all_reduce(size: int, ranks: Ranks) -> int:
    """Returns how many bytes a rank sends in an AllReduce of ``size`` bytes: 2 (n - 1) / n of them."""
    return round(2 * (ranks.count - 1) * size / ranks.count)


def broadcast(size: int, ranks: Ranks, root: int) -> int:
    """Returns how many bytes a rank sends in a Broadcast of ``size`` bytes: (n - 1) times as much if it is the root."""
    return (ranks.count - 1) * size if ranks.rank == root else 0
