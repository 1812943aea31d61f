"""EarlyStopping: ends a run whose held-out loss no longer improves."""

import math
from typing import Optional

from mindspore.train import RunContext

from mindlora.core.fields import COUNT, NOT_NEGATIVE, check_number
from mindlora.training.callbacks.common import (
    Rule,
    RuleCallback,
    check_is_measured,
    check_mode,
    register,
    report_event,
    reported_metrics,
)
from mindlora.training.resume import training_state


@register
class EarlyStopping(RuleCallback):
    """Ends a run when the held-out loss, or another metric, has not improved in ``patience`` measurements in a row.

    LoraCheckpoint keeps the best adapter if its best_metric is the same metric. All ranks see the same held-out loss,
    and stop at the same step.

    Args:
        patience (int): Measurements in a row without an improvement after which the run ends. Default: 3.
        min_delta (float): By how much a measurement must be better than the best one. Default: 0.0.
        metric (str): ``held_out_loss``, or another metric that a callback reports. Default: "held_out_loss".
        mode (str): "min" if a smaller metric is better, "max" if a larger one is. Default: "min".

    Raises:
        ConfigError: An argument is out of range, or nothing measures held_out_loss.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0, metric: str = "held_out_loss", mode: str = "min"):
        super().__init__()
        self.metric = metric
        self.rule = EarlyStop(patience, min_delta, mode)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that the metric is measured."""
        check_is_measured(run_context.original_args(), "EarlyStopping", self.metric)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Counts a measurement, and ends the run if patience has run out."""
        params = run_context.original_args()
        value = reported_metrics(params).get(self.metric)
        if value is None or not self.rule.step(params.cur_step_num, value):
            return
        if params.cur_step_num < training_state.total_steps(params):
            best = "was never finite" if self.rule.best is None else f"has been {self.rule.best:.6g} at best"
            message = (
                f"EarlyStopping: {self.metric} {best} (step {self.rule.best_step}) and has not improved in "
                f"{self.rule.waited} measurements. The run ends."
            )
            report_event(params, "early_stop", message)
        run_context.request_stop()


class EarlyStop(Rule):
    """A rule that counts the measurements since the best one.

    A measurement m improves on the best one b if m < b - min_delta (mode min) or m > b + min_delta (mode max). NaN does
    not improve.
    """

    remembered = ("best", "best_step", "waited")

    def __init__(self, patience: int, min_delta: float = 0.0, mode: str = "min"):
        check_number(patience, "patience", COUNT)
        check_number(min_delta, "min_delta", NOT_NEGATIVE)
        check_mode("mode", mode)
        self.patience = patience
        self.min_delta = min_delta
        self.sign = 1 if mode == "min" else -1
        self.best: Optional[float] = None
        self.best_step = self.waited = 0

    def step(self, step: int, metric: float) -> bool:
        """Counts the measurement of a training step; returns whether it is time to stop."""
        best = math.inf if self.best is None else self.sign * self.best
        if self.sign * metric < best - self.min_delta:
            self.best = metric
            self.best_step = step
            self.waited = 0
        else:
            self.waited += 1
        return self.waited >= self.patience
