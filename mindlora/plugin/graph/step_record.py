"""What a train step measured."""

from typing import NamedTuple, Optional


class StepRecord(NamedTuple):
    """What a train step measured, over all ranks.

    Attributes:
        loss (float): Mean loss of the counted tokens, in nats.
        gradient_norm (float or None): Norm of the gradient before clipping.
        tokens (float or None): Counted tokens of all micro-batches of all ranks; None if the network does not count.
        skipped (bool): Whether the step changed nothing.
        stop (bool): Whether some rank has asked to stop.
        learning_rate (float or None): The rate that was used, or would have been in a skipped step.
    """

    loss: float
    gradient_norm: Optional[float] = None
    tokens: Optional[float] = None
    skipped: bool = False
    stop: bool = False
    learning_rate: Optional[float] = None
