"""WarmUp: raises the learning rate during the first steps, whatever its schedule."""

from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.fields import COUNT, Range, check_number
from mindlora.training.callbacks.common import RateCallback, register, report_event, step_record


@register
class WarmUp(RateCallback):
    """Multiplies the learning rate by start_factor + (1 - start_factor) min((step - 1) / steps, 1).

    It works with every schedule, including schedules with groups or a warm-up of their own.

    Args:
        steps (int): Steps until the factor is 1. Default: 100.
        start_factor (float): The factor at the first step; at least 0 and below 1. Default: 0.1.

    Raises:
        ConfigError: An argument is out of range, or the train step is not mindlora's.
    """

    def __init__(self, steps: int = 100, start_factor: float = 0.1):
        super().__init__()
        check_number(steps, "steps", COUNT)
        check_number(start_factor, "start_factor", Range("a number from 0 to below 1", lambda v: 0 <= v < 1))
        self.steps = steps
        self.start_factor = start_factor

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Sets the factor for the next step."""
        self._choose(run_context.original_args())
        super().on_train_epoch_begin(run_context)

    def update(self, params: InternalCallbackParam) -> None:
        """Chooses the factor for the next step, and reports the first rate and the end of the warm-up."""
        used = self.factor
        self._choose(params)
        if used < 1 and (params.cur_step_num == 1 or self.factor == 1):
            until = f"rises until step {self.steps + 1}" if self.factor < 1 else "has risen to the schedule's rate"
            rate = step_record(params).learning_rate
            report_event(params, "learning_rate", f"WarmUp: the learning rate was {rate:.4g}, and {until}.")

    def _choose(self, params):
        self.factor = warm_up_factor(params.cur_step_num + 1, self.steps, self.start_factor)


def warm_up_factor(step: int, steps: int, start: float) -> float:
    """Returns the factor of the learning rate at a step: start + (1 - start) min((step - 1) / steps, 1).

    Steps count from 1. torch.optim.lr_scheduler.LinearLR multiplies the rate by the same factor at its epoch step - 1.
    """
    done = step - 1
    return 1.0 if done >= steps else start + (1.0 - start) * done / steps
