"""Axes: where the ticks are, what they say, and which unit fits the values."""

import dataclasses
import math
from typing import List, Tuple

import numpy as np

# A range of more than this ratio is shown on a logarithmic axis, where the quantity allows it.
_LOGARITHMIC_ABOVE = 100.0
# Values of more than this times the 99th percentile are spikes.
_SPIKE = 3.0


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        ticks (list): (value, label) of each tick.
        logarithmic (bool): Whether equal distances are equal ratios.
        is_cut (bool): Whether some values lie beyond its end.
    """

    low: float
    high: float
    ticks: List[Tuple[float, str]]
    logarithmic: bool = False
    is_cut: bool = False

    def fraction(self, values: np.ndarray) -> np.ndarray:
        """Returns where values lie on the axis, 0 at its beginning and 1 at its end; NaN where they have no place."""
        values = np.asarray(values, np.float64)
        if self.logarithmic:
            positive = np.where(values > 0, values, np.nan)
            return np.log(positive / self.low) / math.log(self.high / self.low)
        return (values - self.low) / (self.high - self.low)


def step_axis(first: int, last: int) -> Axis:
    """Returns the axis of training steps with ticks at whole steps; it begins at 0 if ``first`` is near."""
    low, high = 0.0 if first <= 0.1 * last else float(first), float(last)
    if low == high:
        low, high = low - 1, high + 1
    distance = max(1.0, _distance(high - low, 6))
    return Axis(low, high, [(tick, f"{tick:,.0f}") for tick in _multiples(low, high, distance)])


def value_axis(
    values: np.ndarray, from_zero: bool = False, may_be_logarithmic: bool = False, cuts_spikes: bool = False
) -> Axis:
    """Returns an axis that holds all finite ``values``, or all but rare spikes.

    Args:
        from_zero (bool): Whether it begins at 0 at the latest.
        may_be_logarithmic (bool): Whether it is logarithmic if the values differ by more than a factor of 100.
        cuts_spikes (bool): Whether values above three times the 99th percentile are left out.
    """
    values = values[np.isfinite(values)]
    if cuts_spikes and len(values) and values.max() > _SPIKE * np.percentile(values, 99) > 0:
        low_values = values[values <= _SPIKE * np.percentile(values, 99)]
        return dataclasses.replace(value_axis(low_values, from_zero, may_be_logarithmic), is_cut=True)
    positive = values[values > 0]
    if may_be_logarithmic and len(positive) and positive.max() > _LOGARITHMIC_ABOVE * positive.min():
        return _logarithmic(positive.min(), positive.max())
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low = min(low, 0.0) if from_zero else low
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (0.0 if from_zero else low - margin), high + margin
    distance = _distance(high - low, 5)
    low, high = math.floor(low / distance) * distance, math.ceil(high / distance) * distance
    ticks = _multiples(low, high, distance)
    return Axis(low, high, list(zip(ticks, _labels(ticks, distance))))


def unit_of_bytes(largest: float) -> Tuple[float, str]:
    """Returns (bytes in the unit, its name) of the unit that shows ``largest`` bytes best."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024.0**power, unit
    return 1.0, "B"


def _logarithmic(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    powers = range(first, last + 1, every)
    return Axis(10.0**first, 10.0**last, [(10.0**power, _power_of_ten(power)) for power in powers], True)


def _power_of_ten(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"


def _distance(extent: float, most: int) -> float:
    """Returns the smallest of 1, 2 and 5 times a power of ten that divides ``extent`` into at most ``most`` parts."""
    power = 10.0 ** math.floor(math.log10(extent / most))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= extent * (1 - 1e-9))


def _multiples(low: float, high: float, distance: float) -> List[float]:
    slack = 1e-9 * distance
    first, last = math.ceil((low - slack) / distance), math.floor((high + slack) / distance)
    return [number * distance for number in range(first, last + 1)]


def _labels(ticks: List[float], distance: float) -> List[str]:
    largest = max(map(abs, ticks))
    if 1e-3 <= largest < 1e6:
        decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
        return [f"{tick:,.{decimals}f}" for tick in ticks]
    # The ticks share the power of ten of the largest, so that they can be compared at a glance.
    power = math.floor(math.log10(largest) + 1e-9)
    decimals = max(0, power - math.floor(math.log10(distance) + 1e-9))
    return [f"{tick / 10.0**power:.{decimals}f}e{power}" if tick else "0" for tick in ticks]
