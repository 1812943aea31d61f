"""Tells a healthy run from one that goes wrong: limits for the next step, and when to go back to an earlier state."""

import collections
import math
from typing import Deque, Dict, List, Optional, Tuple

import numpy as np

from mindlora.common.fields import COUNT, Range, check_number, numbers, whole_numbers

# The median of so many losses, or of all while there are fewer, is the smoothed loss.
SMOOTHED = 16
# So many values make limits.
ENOUGH = 8
# The spreads of log(loss) and log(norm) are taken to be at least this, so that a steady run is not stopped by small
# changes. With LoRA the norm grows while B does.
LEAST_SPREAD, LEAST_NORM_SPREAD = 0.1, 0.3
# A loss that lies less than this above what is usual, in nats per token, is never a fault.
MARGIN = 1.0
# The smoothed loss may rise by so many times the noise of one step; that is FIRST_NOISE at least while little is known.
NOISES, FIRST_NOISE = 4.0, 0.25
# A normal distribution's standard deviation, divided by its median absolute deviation.
_DEVIATION = 1.4826
_TINY = 1e-12


class RunGuard:
    """Watches loss and gradient norm; sees spikes, steps skipped in a row, and a loss that climbs steadily.

    All is computed with logarithms, so that it is the same at every scale. From the last ``window`` values x of the
    loss or of the gradient norm, NaN and infinity left out:

        loss limit = max(exp(median(log x) + spike max(1.4826 MAD(log x), 0.1)), median(x) + 1)
        norm limit = exp(median(log x) + spike max(1.4826 MAD(log x), 0.3))

    A step above a limit should be skipped. A loss that climbs steadily takes its limit along. So the smoothed loss
    s = median(last 16 losses) is compared with b, the smallest s so far:

        ceiling = max(climb b, b exp(4 noise), b + 1),  noise = 1.4826 / sqrt(2) median(|log x_i - log x_(i-1)|)

    Of the first 16 losses, s is the median of all so far, and noise at least 0.25; then b starts anew with s, as one of
    the first may have been small by chance.

    Args:
        spike (float): How many deviations above the median are a spike; at least 3. Default: 6.0.
        climb (float): How many times its best the smoothed loss may be; above 1. Default: 1.5.
        max_skipped (int): So many steps skipped in a row are too many; at least 2. Default: 4.
        window (int): Steps that limits are made from; above 16. Default: 32.

    Attributes:
        skipped (int): Steps skipped in a row.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(self, spike: float = 6.0, climb: float = 1.5, max_skipped: int = 4, window: int = 32):
        check_number(spike, "spike", numbers(3))
        check_number(climb, "climb", Range("a number above 1", lambda v: 1 < v < math.inf))
        check_number(max_skipped, "max_skipped", whole_numbers(2))
        check_number(window, "window", Range(f"a whole number above {SMOOTHED}", lambda v: v > SMOOTHED, (int,)))
        self.spike, self.climb, self.max_skipped = spike, climb, max_skipped
        self._losses: Deque[float] = collections.deque(maxlen=window)
        self._norms: Deque[float] = collections.deque(maxlen=window)
        self._best = math.inf
        self.skipped = 0

    def step(self, loss: float, norm: float, skipped: bool) -> Optional[str]:
        """Looks at a step; returns why the run should go back to an earlier state, or None if it should not.

        Args:
            loss (float): The loss of the step.
            norm (float): Its gradient norm before clipping.
            skipped (bool): Whether it was skipped.
        """
        for value, values in ((loss, self._losses), (norm, self._norms)):
            if math.isfinite(value):
                values.append(value)
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped >= self.max_skipped:
            return f"{self.skipped} steps in a row were skipped"
        if skipped:
            return None
        smoothed = self._smoothed()
        self._best = min(self._best, smoothed)
        if smoothed > self._ceiling():
            return f"the loss climbed from {self._best:.4g} to {smoothed:.4g} (medians of up to {SMOOTHED} steps)"
        if len(self._losses) == SMOOTHED:
            self._best = smoothed
        return None

    @property
    def limits(self) -> Tuple[float, float]:
        """The loss and the gradient norm above which the next step should be skipped; infinity while too little is
        known."""
        loss, norm = _limit(self._losses, self.spike, LEAST_SPREAD), _limit(self._norms, self.spike, LEAST_NORM_SPREAD)
        return max(loss, float(np.median(self._losses or [0.0])) + MARGIN), norm

    @property
    def is_healthy(self) -> bool:
        """Whether the last step was done and the smoothed loss is nearer to its best than to the ceiling."""
        known = len(self._losses) >= ENOUGH and not self.skipped
        return known and self._smoothed() <= math.sqrt(self._best * self._ceiling())

    def forget(self) -> None:
        """Starts anew, after a return to an earlier state or a change of the data."""
        self._losses.clear()
        self._norms.clear()
        self._best, self.skipped = math.inf, 0

    def state(self) -> dict:
        """Returns what a resumed run needs, as JSON values."""
        best = self._best if math.isfinite(self._best) else None
        return {"losses": list(self._losses), "norms": list(self._norms), "best": best, "skipped": self.skipped}

    def restore(self, state: dict) -> None:
        """Takes over what ``state`` returned."""
        self.forget()
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self._best = math.inf if state["best"] is None else state["best"]
        self.skipped = state["skipped"]

    def _smoothed(self):
        return float(np.median(list(self._losses)[-SMOOTHED:]))

    def _ceiling(self):
        steps = np.abs(np.diff(_logarithms(self._losses)))
        noise = _DEVIATION / math.sqrt(2) * float(np.median(steps)) if len(steps) else 0.0
        if len(self._losses) <= SMOOTHED:
            noise = max(noise, FIRST_NOISE)
        return max(self.climb * self._best, self._best * math.exp(NOISES * noise), self._best + MARGIN)


def _limit(values, spike, least):
    """Returns ``spike`` spreads above the median of positive values, infinity while there are too few."""
    if len(values) < ENOUGH:
        return math.inf
    logarithms = _logarithms(values)
    median = np.median(logarithms)
    spread = max(_DEVIATION * float(np.median(np.abs(logarithms - median))), least)
    return math.exp(min(median + spike * spread, 700.0))


def _logarithms(values):
    return np.log(np.maximum(np.asarray(values, np.float64), _TINY))


class Snapshots:
    """The last good state of a run, on the host: copies of arrays, two at most.

    A state is known to be good only some steps later, so the one before it is kept until then.

    Args:
        every (int): Steps between copies; at least 1.
        proven_after (int): Steps after which a copy counts as good. Default: 16, for the smoothed loss of RunGuard.

    Raises:
        ConfigError: ``every`` is out of range.
    """

    def __init__(self, every: int, proven_after: int = SMOOTHED):
        check_number(every, "snapshot_steps", COUNT)
        self.every, self.proven_after = max(every, proven_after), proven_after
        self._kept: List[Tuple[int, Dict[str, np.ndarray]]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been copied yet."""
        return not self._kept

    def is_due(self, step: int) -> bool:
        """Returns whether a copy should be made after ``step``."""
        return self.is_empty or step - self._kept[-1][0] >= self.every

    def add(self, step: int, arrays: Dict[str, np.ndarray]) -> None:
        """Keeps the state after ``step``; ``arrays`` must be copies."""
        self._kept = [*self._kept[-1:], (step, arrays)]

    def go_back(self, step: int) -> Tuple[int, Dict[str, np.ndarray]]:
        """Returns the step and the arrays of the last good state, seen from ``step``; it is the only one kept now."""
        proven = [kept for kept in self._kept if step - kept[0] >= self.proven_after]
        self._kept = [(proven or self._kept)[-1 if proven else 0]]
        return self._kept[0]
