"""ReduceOnPlateau: cuts the learning rate when a metric has stopped improving."""

import dataclasses
import math
from typing import Any, Dict

from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, FRACTION, INDEX, NOT_NEGATIVE, check_number
from mindlora.training.callbacks.common import (
    RateCallback,
    Rule,
    check_is_measured,
    check_mode,
    register,
    report_event,
    reported_metrics,
    step_record,
)


@register
class ReduceOnPlateau(RateCallback):
    """Cuts the learning rate when a metric has stopped improving, as PyTorch's ReduceLROnPlateau does.

    One measurement is one call of PyTorch's ``step``; where the schedule is constant, the rates are the same. A falling
    schedule keeps falling, multiplied by the cuts. With several groups, as in LoRA+, the reported rate is compared with
    min_lr and eps, and all groups are cut alike.

    Args:
        metric (str): ``held_out_loss``, another metric that a callback reports, or ``loss``, the mean training loss of
            every_steps steps. Default: "held_out_loss".
        every_steps (int): For the metric ``loss``: steps in one measurement. Default: 100.
        **settings: mode, factor, patience, threshold, threshold_mode, cooldown, min_lr and eps, with PyTorch's meanings
            and defaults: see PlateauRate.

    Raises:
        ConfigError: An argument is out of range, nothing measures held_out_loss, or the train step is not mindlora's.
    """

    def __init__(self, metric: str = "held_out_loss", every_steps: int = 100, **settings: Any):
        super().__init__()
        check_number(every_steps, "every_steps", COUNT)
        self.metric = metric
        self.every_steps = every_steps
        self.rule = PlateauRate(**settings)
        self.losses = []
        self.factor = 1.0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that the metric is measured."""
        check_is_measured(run_context.original_args(), "ReduceOnPlateau", self.metric)

    def update(self, params: InternalCallbackParam) -> None:
        """Cuts the factor if the metric was measured and a cut is due."""
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

    def training_state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values."""
        return {"rule": self.rule.state(), "losses": self.losses, "factor": self.factor}

    def restore_training_state(self, state: Dict[str, Any]) -> None:
        """Restores what ``training_state`` returned."""
        self.rule.restore(state["rule"])
        self.losses = state["losses"]
        self.factor = state["factor"]

    def _measured(self, params, record):
        """Returns the metric if it was measured at this step, or None."""
        if self.metric != "loss":
            return reported_metrics(params).get(self.metric)
        if record.is_empty:
            return None
        self.losses.append(record.loss)
        if len(self.losses) < self.every_steps:
            return None
        losses = self.losses
        self.losses = []
        return sum(losses) / len(losses)


@dataclasses.dataclass(eq=False)
class PlateauRate(Rule):
    """A rule that decides after each measurement whether to cut the rate.

    A measurement m improves on the best measurement b, and replaces it, if

        mode min:  m < b (1 - threshold)  or, with threshold_mode abs,  m < b - threshold
        mode max:  m > b (1 + threshold)  or                            m > b + threshold

    After more than ``patience`` measurements in a row that do not improve, rate = max(factor rate, min_lr), unless that
    lowers it by eps or less; then ``cooldown`` measurements are not counted. NaN does not improve.

    Args:
        mode (str): "min" if a smaller metric is better, "max" if a larger one is. Default: "min".
        factor (float): Factor of a cut, above 0 and below 1. Default: 0.1.
        patience (int): Measurements without an improvement that are tolerated. Default: 10.
        threshold (float): The smallest improvement that counts; at least 0. Default: 1e-4.
        threshold_mode (str): "rel" if threshold is a fraction of the best value, "abs" if it is in units of the metric.
            Default: "rel".
        cooldown (int): Measurements after a cut that are not counted. Default: 0.
        min_lr (float): The lowest rate. Default: 0.0.
        eps (float): A cut of this size or less is not made. Default: 1e-8.

    Raises ConfigError if an argument is out of range. Source: torch.optim.lr_scheduler.ReduceLROnPlateau.
    """

    remembered = ("best", "bad", "cooling")

    mode: str = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: str = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8

    def __post_init__(self):
        check_mode("mode", self.mode)
        if self.threshold_mode not in ("rel", "abs"):
            raise ConfigError(f"threshold_mode is {self.threshold_mode!r}, but it must be 'rel' or 'abs'.")
        check_number(self.factor, "factor", FRACTION)
        for name in ("patience", "cooldown"):
            check_number(getattr(self, name), name, INDEX)
        for name in ("threshold", "min_lr", "eps"):
            check_number(getattr(self, name), name, NOT_NEGATIVE)
        self.best = math.inf if self.mode == "min" else -math.inf
        self.bad = self.cooling = 0

    def step(self, metric: float, rate: float) -> float:
        """Returns the rate to use after a measurement, given the current rate."""
        if self._improves(metric):
            self.best = metric
            self.bad = 0
        else:
            self.bad += 1
        if self.cooling > 0:
            self.cooling -= 1
            self.bad = 0
        if self.bad <= self.patience:
            return rate
        self.cooling = self.cooldown
        self.bad = 0
        cut = max(rate * self.factor, self.min_lr)
        return cut if rate - cut > self.eps else rate

    def state(self) -> Dict[str, Any]:
        # JSON has no infinity.
        return {**super().state(), "best": str(self.best)}

    def restore(self, state: Dict[str, Any]) -> None:
        super().restore({**state, "best": float(state["best"])})

    def _improves(self, metric):
        part, amount = (self.threshold, 0.0) if self.threshold_mode == "rel" else (0.0, self.threshold)
        if self.mode == "min":
            return metric < self.best * (1.0 - part) - amount
        return metric > self.best * (1.0 + part) + amount
