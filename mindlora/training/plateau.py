"""Cuts the learning rate when a metric has stopped improving, exactly as PyTorch's ReduceLROnPlateau does."""

import math

from mindlora.common.fields import FRACTION, INDEX, NOT_NEGATIVE, check_number
from mindlora.errors import ConfigError

MODES, THRESHOLD_MODES = ("min", "max"), ("rel", "abs")


class PlateauRate:
    """Decides from one measurement after another whether to cut the rate.

    A measurement m improves on the best one b, and takes its place, if

        mode min:  m < b (1 - threshold)  or, with threshold_mode abs,  m < b - threshold
        mode max:  m > b (1 + threshold)  or                            m > b + threshold

    After more than ``patience`` measurements in a row that do not improve, rate = max(factor rate, min_lr), unless that
    lowers it by eps or less; then ``cooldown`` measurements are not counted. NaN does not improve.

    Args:
        mode (str): "min" if a smaller metric is better, "max" if a larger one is. Default: "min".
        factor (float): Factor of a cut, above 0 and below 1. Default: 0.1.
        patience (int): Measurements without an improvement that are accepted. Default: 10.
        threshold (float): How much is an improvement; at least 0. Default: 1e-4.
        threshold_mode (str): "rel" if threshold is a part of the best, "abs" if it is in units of the metric.
            Default: "rel".
        cooldown (int): Measurements after a cut that are not counted. Default: 0.
        min_lr (float): The lowest rate. Default: 0.0.
        eps (float): A cut by no more than this is not made. Default: 1e-8.

    Raises:
        ConfigError: An argument is out of range.

    Source: torch.optim.lr_scheduler.ReduceLROnPlateau.
    """

    def __init__(
        self,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ):
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}, but it must be 'min' or 'max'.")
        if threshold_mode not in THRESHOLD_MODES:
            raise ConfigError(f"threshold_mode is {threshold_mode!r}, but it must be 'rel' or 'abs'.")
        check_number(factor, "factor", FRACTION)
        for name, value in (("patience", patience), ("cooldown", cooldown)):
            check_number(value, name, INDEX)
        for name, value in (("threshold", threshold), ("min_lr", min_lr), ("eps", eps)):
            check_number(value, name, NOT_NEGATIVE)
        self.mode, self.factor, self.patience, self.cooldown = mode, factor, patience, cooldown
        self.threshold, self.threshold_mode, self.min_lr, self.eps = threshold, threshold_mode, min_lr, eps
        self._best = math.inf if mode == "min" else -math.inf
        self._bad = self._cooling = 0

    def step(self, metric: float, rate: float) -> float:
        """Returns the rate to use after a measurement.

        Args:
            metric (float): The measurement.
            rate (float): The learning rate now.
        """
        if self._improves(metric):
            self._best, self._bad = metric, 0
        else:
            self._bad += 1
        if self._cooling > 0:
            self._cooling, self._bad = self._cooling - 1, 0
        if self._bad <= self.patience:
            return rate
        self._cooling, self._bad = self.cooldown, 0
        cut = max(rate * self.factor, self.min_lr)
        return cut if rate - cut > self.eps else rate

    def state(self) -> dict:
        """Returns what a resumed run needs, as JSON values."""
        # JSON has no infinity.
        return {"best": str(self._best), "bad": self._bad, "cooling": self._cooling}

    def restore(self, state: dict) -> None:
        """Takes over what ``state`` returned."""
        self._best, self._bad, self._cooling = float(state["best"]), state["bad"], state["cooling"]

    def _improves(self, metric):
        part, amount = (self.threshold, 0.0) if self.threshold_mode == "rel" else (0.0, self.threshold)
        if self.mode == "min":
            return metric < self._best * (1.0 - part) - amount
        return metric > self._best * (1.0 + part) + amount
