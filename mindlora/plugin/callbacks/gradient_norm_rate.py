"""GradientNormRate: the learning rate follows the gradient norm."""

from typing import TYPE_CHECKING, Any

from mindlora.plugin.callbacks.common import register, report_event, step_record
from mindlora.plugin.callbacks.step_control import RateCallback
from mindlora.training import gradient_norm_rate

if TYPE_CHECKING:
    from mindspore.train.callback._callback import InternalCallbackParam

_MESSAGES = {
    "cut": "GradientNormRate: the gradient norm {norm:.4g} is a spike; the factor of the learning rate falls",
    "recovered": "GradientNormRate: no spike has come again; the factor of the learning rate is back",
    "highest": "GradientNormRate: the factor of the learning rate has risen",
}


@register
class GradientNormRate(RateCallback):
    """Raises the learning rate slowly while the gradient norm is steady, cuts it on a spike, and recovers after it.

    Args:
        **settings: window, spike, steady, cut, recovery_steps, growth, min_factor and max_factor of the rule
            mindlora.training.gradient_norm_rate.GradientNormRate, which has the equations.

    Raises:
        ConfigError: An argument is out of range, or the train step is not mindlora's.
    """

    def __init__(self, **settings: Any):
        super().__init__()
        self.rule = gradient_norm_rate.GradientNormRate(**settings)

    @property
    def factor(self) -> float:
        """The factor of the learning rate for the next step."""
        return self.rule.factor

    def update(self, params: "InternalCallbackParam") -> None:
        """Looks at the gradient norm of the step, and reports a cut and the end of a recovery or of the growth."""
        record = step_record(params)
        happened = self.rule.step(record.gradient_norm)
        if happened:
            message = _MESSAGES[happened].format(norm=record.gradient_norm)
            rate = f"this step's rate was {record.learning_rate:.4g}"
            report_event(params, "learning_rate", f"{message} to {self.factor:.4g} ({rate}).")

    def training_state(self) -> dict:
        """Returns what a resumed run needs, as JSON values."""
        return self.rule.state()

    def restore_training_state(self, state: dict) -> None:
        """Takes over what ``training_state`` returned."""
        self.rule.restore(state)
