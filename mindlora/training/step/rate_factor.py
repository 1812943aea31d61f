"""Learning rates times a factor, which may change during training without recompilation."""

from typing import Dict, Union

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.models.names import TRANSIENT

_NAME = f"{TRANSIENT}learning_rate_factor"


class ScaledSchedule(LearningRateSchedule):
    """A schedule times a factor: rate(step) = factor schedule(step).

    A factor that is a parameter, float32 [], can change without recompilation.
    """

    def __init__(self, schedule: nn.Cell, factor: Union[float, Parameter]):
        super().__init__()
        self.schedule = schedule
        self.factor = factor

    def construct(self, global_step: Tensor) -> Tensor:
        return self.schedule(global_step) * self.factor


class RateFactor:
    """A factor of all learning rates of an optimizer: the product of several sources' factors.

    The schedules of the optimizer, MindSpore's or MindFormers', are replaced by factored ones.
    """

    UNREAD_BY_GRAPHS = ("factors",)

    def __init__(self, optimizer: nn.Optimizer):
        self.factors: Dict[str, float] = {}
        self._parameter = Parameter(Tensor(1, mstype.float32), name=_NAME, requires_grad=False)
        self._fixed = []
        if not optimizer.dynamic_lr:
            rates = optimizer.learning_rate if optimizer.is_group_lr else [optimizer.learning_rate]
            distinct = {id(rate): rate for rate in rates}
            self._fixed = [(rate, float(rate.asnumpy())) for rate in distinct.values()]
        elif optimizer.is_group_lr:
            # Parameters that share a schedule share its factored version too.
            factored = {id(rate): ScaledSchedule(rate, self._parameter) for rate in optimizer.learning_rate}
            schedules = [factored[id(rate)] for rate in optimizer.learning_rate]
            optimizer.learning_rate = nn.CellList(schedules, auto_prefix=False)
        else:
            optimizer.learning_rate = ScaledSchedule(optimizer.learning_rate, self._parameter)

    @property
    def parameter(self) -> Parameter:
        """The product of all factors: float32 []."""
        return self._parameter

    def set(self, source: str, value: float) -> None:
        """Sets the factor of ``source``, at least 0; rates become schedule(step) times all factors."""
        self.factors[source] = float(value)
        product = 1.0
        for factor in self.factors.values():
            product *= factor
        # Not set_data: a parameter used only in a branch of a compiled graph would keep its old value.
        ops.assign(self._parameter, Tensor(product, mstype.float32))
        for rate, value_at_start in self._fixed:
            ops.assign(rate, Tensor(value_at_start * product, mstype.float32))
