"""Whether all ranks hold the same adapters: a digest of each rank's values, compared by every rank."""

import hashlib
from typing import Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.errors import LoraError


class _Gather(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.all_gather = ops.AllGather()

    def construct(self, x: Tensor) -> Tensor:
        return self.all_gather(x)


def digest(parameters: Sequence[Parameter]) -> np.ndarray:
    """Returns the SHA-256 of the parameters' names and values: int32 [8]."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.name.encode())
        found.update(parameter.asnumpy().tobytes())
    return np.frombuffer(found.digest(), np.int32)


def check_agreement(parameters: Sequence[Parameter], step: int) -> None:
    """Compares the parameters of all ranks, each of which must call this.

    Args:
        parameters (Sequence[Parameter]): What must be the same on every rank, in the same order.
        step (int): The step that has just ended, for the message.

    Raises:
        LoraError: They differ; every rank raises it, and it names the ranks that differ from rank 0.
    """
    gathered = _Gather()(Tensor(digest(parameters), mstype.int32)).asnumpy().reshape(-1, 8)
    differing = [rank for rank in range(len(gathered)) if (gathered[rank] != gathered[0]).any()]
    if differing:
        raise LoraError(
            f"After step {step}, the trained parameters of rank {', '.join(map(str, differing))} differ from those of "
            "rank 0, so the ranks no longer train one adapter. Resume from a step before; if it happens again, look "
            "for what differs between the machines (versions, hardware errors)."
        )
