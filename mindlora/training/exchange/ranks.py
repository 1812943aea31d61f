"""Ranks that exchange gradients: their collective operations, the bytes sent, and whether the ranks still agree."""

import hashlib
from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import LoraError

# Bytes per number.
FLOAT32 = 4
FLOAT16 = 2
# On CPUs, the receiver of a message returns all of it as a receipt, so a network device counts twice as many bytes.
CPU_RECEIPTS = 2


@dataclass(frozen=True)
class Ranks:
    """A communication group as seen by one of its ranks; ``group`` is its name, or None for all ranks."""

    rank: int
    count: int
    group: Optional[str] = None

    def all_reduce(self) -> ops.AllReduce:
        """Returns an operator that sums a tensor over the group."""
        return ops.AllReduce(ops.ReduceOp.SUM, self.group) if self.group else ops.AllReduce()

    def bytes_to_sum(self, elements: int, element_bytes: int = FLOAT32) -> int:
        """Returns the bytes of payload that a rank sends in an AllReduce: 2 (n - 1) / n times the vector's bytes.

        MindSpore's AllReduce on CPUs is a ring, in which each of n ranks sends 2 (n - 1) chunks of 1/n of the vector.
        """
        return round(2 * (self.count - 1) * elements * element_bytes / self.count)


class _Gather(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.all_gather = ops.AllGather()

    def construct(self, x: Tensor) -> Tensor:
        return self.all_gather(x)


def digest(parameters: Sequence[Parameter]) -> np.ndarray:
    """Returns the SHA-256 of the parameters' names and values: int32 [8]."""
    sha256 = hashlib.sha256()
    for parameter in parameters:
        sha256.update(parameter.name.encode())
        sha256.update(parameter.asnumpy().tobytes())
    return np.frombuffer(sha256.digest(), np.int32)


def check_agreement(parameters: Sequence[Parameter], step: int) -> None:
    """Compares parameters, in the same order on all ranks; every rank must call this after a step.

    Raises LoraError on every rank if the parameters differ; it names the ranks that differ from rank 0.
    """
    gathered = _Gather()(Tensor(digest(parameters), mstype.int32)).asnumpy().reshape(-1, 8)
    differing = [rank for rank in range(len(gathered)) if (gathered[rank] != gathered[0]).any()]
    if differing:
        raise LoraError(
            f"After step {step}, the trained parameters of rank {', '.join(map(str, differing))} differ from those of "
            "rank 0, so the ranks no longer train one adapter. Resume from an earlier step; if it happens again, look "
            "for differences between the machines (versions, hardware errors)."
        )
