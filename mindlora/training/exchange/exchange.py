"""What every exchange of gradients is: three methods in the graph's terms, and a count of bytes."""

from typing import Optional, Tuple

from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.training.rate_factor import TRANSIENT

# Each rank has a residual of its own, so it is no part of the state that rank 0 saves.
RESIDUAL_NAME = f"{TRANSIENT}gradient_exchange_residual"


class Exchange(nn.Cell):
    """Sums a flat vector over the ranks of a group.

    The train step calls ``reduce`` inside its graph, and ``keep`` only if the step is done and not skipped.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.nothing = Tensor([0.0], mstype.float32)

    def reduce(self, flat: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the sum over the ranks, and the residual for keep; it changes nothing.

        Args:
            flat (Tensor): This rank's gradients, float32 [size].

        Returns:
            tuple of Tensor: the sum, float32 [size], the same bits on every rank; and what this rank has not sent.
        """
        raise NotImplementedError

    def keep(self, residual: Tensor) -> Tensor:
        """Keeps the residual, to be sent in later steps, and returns it."""
        return residual

    def bytes_at(self, step: int) -> int:
        """Returns how many bytes this rank sends in step ``step``; steps count from 0, without the skipped ones."""
        raise NotImplementedError

    def bytes_between_machines_at(self, step: int) -> int:
        """Returns how many of the bytes of ``bytes_at`` leave this rank's machine."""
        return self.bytes_at(step)

    def steps_done(self) -> int:
        """Returns how many steps were kept; an exchange that is the same in all steps does not count them."""
        return 0

    def unsent(self) -> Optional[Parameter]:
        """Returns the parameter with what this rank has not sent yet, float32; None if the exchange sends all."""
        return None

    @property
    def bytes_per_step(self) -> int:
        """How many bytes this rank sent in the last step."""
        return self.bytes_at(max(self.steps_done() - 1, 0))
