"""GradientNormRate: adapts the learning rate to the gradient norm."""

import collections
import dataclasses
import math
from typing import Any, Deque

import numpy as np
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.fields import COUNT, FACTOR, FRACTION, NOT_NEGATIVE, Range, check_number, numbers, whole_numbers
from mindlora.training.callbacks.common import RateCallback, Rule, RuleCallback, register, report_event, step_record

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
