"""ReduceOnPlateau: cuts the learning rate when a metric has stopped improving."""

from typing import TYPE_CHECKING, Any

from mindspore.train import RunContext

from mindlora.common.fields import COUNT, check_number
from mindlora.plugin.callbacks.common import register, report_event, step_record
from mindlora.plugin.callbacks.step_control import RateCallback, check_is_measured
from mindlora.training.plateau import PlateauRate

if TYPE_CHECKING:
    from mindspore.train.callback._callback import InternalCallbackParam


@register
class ReduceOnPlateau(RateCallback):
    """Cuts the learning rate when a metric has stopped improving, as PyTorch's ReduceLROnPlateau does.

    One measurement is one call of PyTorch's ``step``; where the schedule is constant, the rates are the same. A
    schedule that falls goes on falling, times the cuts. Of several groups, as with LoRA+, the reported rate is compared
    with min_lr and eps, and all groups are cut alike.

    Args:
        metric (str): ``held_out_loss``, another metric that a callback reports, or ``loss``, the mean training loss of
            every_steps steps. Default: "held_out_loss".
        every_steps (int): For metric ``loss``: steps of one measurement. Default: 100.
        **settings: mode, factor, patience, threshold, threshold_mode, cooldown, min_lr and eps, with PyTorch's meanings
            and defaults: see mindlora.training.plateau.PlateauRate.

    Raises:
        ConfigError: An argument is out of range, nothing measures held_out_loss, or the train step is not mindlora's.
    """

    def __init__(self, metric: str = "held_out_loss", every_steps: int = 100, **settings: Any):
        super().__init__()
        check_number(every_steps, "every_steps", COUNT)
        self.metric, self.every_steps, self.rule = metric, every_steps, PlateauRate(**settings)
        self.losses, self.factor = [], 1.0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that the metric is measured."""
        check_is_measured(run_context.original_args(), "ReduceOnPlateau", self.metric)

    def update(self, params: "InternalCallbackParam") -> None:
        """Cuts the factor if the metric has been measured and it is time."""
        record = step_record(params)
        value = self._measured(params, record)
        if value is None:
            return
        rate = record.learning_rate
        cut = self.rule.step(value, rate)
        if cut != rate:
            self.factor *= cut / rate
            message = (
                f"ReduceOnPlateau: {self.metric} is {value:.6g} and no longer improves; the learning rate goes "
                f"from {rate:.4g} to {cut:.4g}."
            )
            report_event(params, "learning_rate", message)

    def training_state(self) -> dict:
        """Returns what a resumed run needs, as JSON values."""
        return {"rule": self.rule.state(), "losses": self.losses, "factor": self.factor}

    def restore_training_state(self, state: dict) -> None:
        """Takes over what ``training_state`` returned."""
        self.rule.restore(state["rule"])
        self.losses, self.factor = state["losses"], state["factor"]

    def _measured(self, params, record):
        """Returns the metric if it was measured at this step, or None."""
        if self.metric != "loss":
            return (params.get("eval_results") or {}).get(self.metric)
        self.losses.append(record.loss)
        if len(self.losses) < self.every_steps:
            return None
        losses, self.losses = self.losses, []
        return sum(losses) / len(losses)
