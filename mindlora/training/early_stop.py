"""Decides when a metric has not improved for long enough to stop."""

import math
from typing import Optional

from mindlora.common.fields import COUNT, NOT_NEGATIVE, check_number
from mindlora.errors import ConfigError


class EarlyStop:
    """Counts the measurements since the best one.

    A measurement m improves on the best one b if m < b - min_delta (mode min) or m > b + min_delta (mode max). NaN does
    not improve.

    Args:
        patience (int): Measurements in a row without an improvement after which to stop; at least 1.
        min_delta (float): How much is an improvement; at least 0. Default: 0.0.
        mode (str): "min" if a smaller metric is better, "max" if a larger one is. Default: "min".

    Attributes:
        best (float, optional): The best measurement.
        best_step (int): Its step.
        waited (int): Measurements since then.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(self, patience: int, min_delta: float = 0.0, mode: str = "min"):
        check_number(patience, "patience", COUNT)
        check_number(min_delta, "min_delta", NOT_NEGATIVE)
        if mode not in ("min", "max"):
            raise ConfigError(f"mode is {mode!r}, but it must be 'min' or 'max'.")
        self.patience, self.min_delta, self.sign = patience, min_delta, 1 if mode == "min" else -1
        self.best: Optional[float] = None
        self.best_step = self.waited = 0

    def step(self, step: int, metric: float) -> bool:
        """Counts a measurement; returns whether it is time to stop.

        Args:
            step (int): The training step of the measurement.
            metric (float): What was measured.
        """
        best = math.inf if self.best is None else self.sign * self.best
        if self.sign * metric < best - self.min_delta:
            self.best, self.best_step, self.waited = metric, step, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def state(self) -> dict:
        """Returns what a resumed run needs, as JSON values."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def restore(self, state: dict) -> None:
        """Takes over what ``state`` returned."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
