"""Callbacks that change the learning rate during a run, whatever its schedule."""

import collections
import dataclasses
import math
from typing import Any, Deque, Dict

import numpy as np
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import ConfigError
from mindlora.core.fields import (
    COUNT,
    FACTOR,
    FRACTION,
    INDEX,
    NOT_NEGATIVE,
    Range,
    check_number,
    numbers,
    whole_numbers,
)
from mindlora.training.callbacks.common import (
    RateCallback,
    Rule,
    RuleCallback,
    check_is_measured,
    check_mode,
    register,
    report_event,
    reported_metrics,
    step_record,
)


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


_MESSAGES = {
    "cut": "GradientNormRate: the gradient norm {norm:.4g} is a spike; the factor of the learning rate falls",
    "recovered": "GradientNormRate: no further spike; the factor of the learning rate is back",
    "highest": "GradientNormRate: the factor of the learning rate has risen",
}


@register
class GradientNormRate(RuleCallback, RateCallback):
    """Raises the learning rate slowly while the gradient norm is steady, cuts it on a spike, and then restores it.

    Args:
        **settings: window, spike, steady, cut, recovery_steps, growth, min_factor and max_factor; see
            GradientNormFactor for the equations.

    Raises:
        ConfigError: An argument is out of range, or the train step is not mindlora's.
    """

    def __init__(self, **settings: Any):
        super().__init__()
        self.rule = GradientNormFactor(**settings)

    @property
    def factor(self) -> float:
        """The factor of the learning rate for the next step."""
        return self.rule.factor

    def update(self, params: InternalCallbackParam) -> None:
        """Checks the gradient norm of the step, and reports a cut and the end of a recovery or of the growth."""
        record = step_record(params)
        if record.is_empty:
            return
        happened = self.rule.step(record.gradient_norm)
        if happened:
            message = _MESSAGES[happened].format(norm=record.gradient_norm)
            rate = f"this step's rate was {record.learning_rate:.4g}"
            report_event(params, "learning_rate", f"{message} to {self.factor:.4g} ({rate}).")


@dataclasses.dataclass(eq=False)
class GradientNormFactor(Rule):
    """The factor f of the learning rate, computed from each step's gradient norm g.

    m is the median of the last ``window`` norms before g, h the factor at the last spike (h = 0 before the first).
    Until ``window`` norms are known, f stays 1. Then, after each step,

        g > spike m:               f' = max(cut f, min_factor),  h' = f             (a spike)
        g <= steady m and f < h:   f' = min(f cut^(-1 / recovery_steps), h)         (recovery over recovery_steps)
        g <= steady m otherwise:   f' = min(f (1 + growth), max_factor)             (growth)
        otherwise:                 f' = f

    A spike during the recovery lowers h, so the rate does not return to a value that keeps causing spikes. The spike
    joins the window like any other norm: a level that lasts for more than half a window is the new normal. A norm that
    is not finite is ignored; such a step is skipped anyway.

    Args:
        window (int): Number of norms in the median; at least 4. Default: 32.
        spike (float): A norm above this multiple of the median is a spike; above ``steady``. Default: 4.0.
        steady (float): A norm up to this multiple of the median is steady; at least 1. Default: 1.5.
        cut (float): Factor of a cut, above 0 and below 1. Default: 0.5.
        recovery_steps (int): Steady steps that undo one cut; at least 1. Default: 50.
        growth (float): Relative growth of the rate per steady step; at least 0. Default: 0.001, which doubles it in 694
            steps.
        min_factor (float): The lowest factor; above 0 and at most 1. Default: 0.05.
        max_factor (float): The highest factor; at least 1. Default: 2.0.

    Raises ConfigError if an argument is out of range.
    """

    remembered = ("factor", "at_spike", "norms")

    window: int = 32
    spike: float = 4.0
    steady: float = 1.5
    cut: float = 0.5
    recovery_steps: int = 50
    growth: float = 0.001
    min_factor: float = 0.05
    max_factor: float = 2.0

    def __post_init__(self):
        check_number(self.window, "window", whole_numbers(4))
        check_number(self.steady, "steady", numbers(1))
        above_steady = Range(f"a number above steady, {self.steady}", lambda v: self.steady < v < math.inf)
        check_number(self.spike, "spike", above_steady)
        check_number(self.cut, "cut", FRACTION)
        check_number(self.recovery_steps, "recovery_steps", COUNT)
        check_number(self.growth, "growth", NOT_NEGATIVE)
        check_number(self.min_factor, "min_factor", FACTOR)
        check_number(self.max_factor, "max_factor", numbers(1))
        self.factor = 1.0
        self.at_spike = 0.0
        self.norms: Deque[float] = collections.deque(maxlen=self.window)

    def step(self, norm: float) -> str:
        """Updates the factor by an unclipped gradient norm; returns "cut", "recovered", "highest", or "" for none."""
        if not math.isfinite(norm):
            return ""
        median = float(np.median(self.norms)) if len(self.norms) == self.norms.maxlen else 0.0
        self.norms.append(norm)
        if median == 0:
            return ""
        before = self.factor
        if norm > self.spike * median:
            self.factor = max(before * self.cut, self.min_factor)
            self.at_spike = before
            return "cut" if self.factor < before else ""
        if norm > self.steady * median:
            return ""
        if before < self.at_spike:
            self.factor = min(before * self.cut ** (-1.0 / self.recovery_steps), self.at_spike)
            return "recovered" if self.factor == self.at_spike else ""
        self.factor = min(before * (1.0 + self.growth), self.max_factor)
        return "highest" if before < self.factor == self.max_factor else ""
