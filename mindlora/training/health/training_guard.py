"""TrainingGuard: skips bad steps, goes back to the last good state, and ends a run that keeps diverging."""

import collections
import math
from typing import Any, Deque, Dict, List, Optional, Tuple

import numpy as np
from mindspore import Callback
from mindspore.train import RunContext

from mindlora.core.errors import DivergenceError
from mindlora.core.fields import COUNT, FACTOR, Range, check_number, numbers, whole_numbers
from mindlora.training.callbacks.common import (
    Rule,
    controlled_step,
    copy_state,
    put_back,
    register,
    report_event,
    step_record,
)
from mindlora.training.resume.collectives import wait_for_all_ranks

_NAME = "TrainingGuard"
# The smoothed loss is the median of this many losses, or of all if there are fewer.
SMOOTHED = 16
# The smallest number of values for a limit.
ENOUGH = 8
# Lower bounds of the spreads of log(loss) and log(norm), so that small changes do not stop a steady run. With LoRA, the
# norm grows along with B.
LEAST_SPREAD = 0.1
LEAST_NORM_SPREAD = 0.3
# A loss less than this above the usual loss, in nats per token, is never a fault.
MARGIN = 1.0
# The smoothed loss may rise by NOISES times the noise of one step, which is initially taken to be FIRST_NOISE.
NOISES = 4.0
FIRST_NOISE = 0.25
# A normal distribution's standard deviation, divided by its median absolute deviation.
_DEVIATION = 1.4826
_TINY = 1e-12


@register
class TrainingGuard(Callback):
    """Watches loss and gradient norm; skips bad steps, goes back, lowers the rate, and, as a last resort, ends a run.

    1. A step whose loss or gradient norm is NaN, infinite or a spike is skipped: it changes neither the adapter nor the
       optimizer. RunGuard defines a spike by equations.
    2. After ``max_skipped`` such steps in a row, or when the loss has climbed far above its best without a spike, the
       adapter and the optimizer are restored to the last healthy state (a copy on the host), and the learning rate is
       multiplied by ``rate_cut``. The data continues, so a bad batch does not come again.
    3. If a further return is needed after ``max_rollbacks`` returns, the run goes back once more, LoraCheckpoint saves
       this last good state, and the run ends with DivergenceError.

    All ranks see the same loss and norm, and decide alike. With a dynamic loss scale, an overflow while the scale is
    above 1 lowers the scale and is not a fault; nor is a step in which no token counts. After a resume, the resumed
    state is the last good state.

    Args:
        max_skipped (int): The run goes back after this number of skipped steps in a row; at least 2. Default: 4.
        max_rollbacks (int): Maximum number of times that the run may go back. Default: 5.
        rate_cut (float): Factor of the learning rate at each return; above 0 and at most 1. Default: 0.3.
        snapshot_steps (int): Steps between copies of the state; values below 16 count as 16. Default: 50.
        **settings: spike, climb and window of RunGuard.

    Raises:
        ConfigError: An argument is out of range, or the train step is not mindlora's.
        DivergenceError: At the end of the run: it went wrong more than ``max_rollbacks`` times.
    """

    def __init__(
        self,
        max_skipped: int = 4,
        max_rollbacks: int = 5,
        rate_cut: float = 0.3,
        snapshot_steps: int = 50,
        **settings: Any,
    ):
        super().__init__()
        check_number(max_rollbacks, "max_rollbacks", COUNT)
        check_number(rate_cut, "rate_cut", FACTOR)
        self.guard = RunGuard(max_skipped=max_skipped, **settings)
        self.snapshots = Snapshots(snapshot_steps)
        self.max_rollbacks = max_rollbacks
        self.rate_cut = rate_cut
        self.rollbacks = 0
        self.factor = 1.0
        self.failure = None

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Copies the initial state, and sets the limits and the rate that a resumed run had."""
        # Not when training begins: a resumed run may not have its state by then.
        params = run_context.original_args()
        step = controlled_step(params, _NAME)
        if self.snapshots.is_empty:
            self.snapshots.add(params.cur_step_num, copy_state(step))
            step.set_limits(*self.guard.limits)
            step.set_rate_factor(_NAME, self.factor)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Judges the step, goes back if necessary, and sets the limits of the next step."""
        params = run_context.original_args()
        step = controlled_step(params, _NAME)
        record = step_record(params)
        if record.is_empty or _is_left_to_loss_scale(step, params.net_outputs, record.loss):
            return
        if record.skipped:
            usual, highest = self.guard.limits
            message = (
                f"{_NAME}: the step was skipped: loss {record.loss:.4g} (limit {usual:.4g}), "
                f"gradient norm {record.gradient_norm:.4g} (limit {highest:.4g})."
            )
            report_event(params, "skipped_step", message)
        # A policy's loss does not measure its quality, so the guard then watches only gradient norms.
        loss = record.loss if record.loss_falls else math.nan
        reason = self.guard.step(loss, record.gradient_norm, record.skipped)
        if reason is not None:
            self._go_back(run_context, step, reason)
        elif self.snapshots.is_due(params.cur_step_num) and self.guard.is_healthy:
            self.snapshots.add(params.cur_step_num, copy_state(step))
        step.set_limits(*self.guard.limits)

    def __exit__(self, *error: Any) -> None:
        """Raises DivergenceError if the guard has ended the run; by now, the other callbacks have saved everything."""
        if self.failure is not None and error[0] is None:
            # Otherwise, msrun would kill the other workers while they save.
            wait_for_all_ranks()
            raise DivergenceError(self.failure)

    def training_state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values."""
        return {"guard": self.guard.state(), "rollbacks": self.rollbacks, "factor": self.factor}

    def restore_training_state(self, state: Dict[str, Any]) -> None:
        """Restores what ``training_state`` returned."""
        self.guard.restore(state["guard"])
        self.rollbacks = state["rollbacks"]
        self.factor = state["factor"]

    def _go_back(self, run_context, step, reason):
        """Restores the last good state, and cuts the rate or ends the run."""
        params = run_context.original_args()
        origin, arrays = self.snapshots.go_back(params.cur_step_num)
        put_back(step, arrays)
        self.guard.forget()
        self.rollbacks += 1
        if self.rollbacks > self.max_rollbacks:
            self.failure = (
                f"{_NAME} ended the run at step {params.cur_step_num}: {reason}, after {self.max_rollbacks} returns "
                f"to an earlier state. The adapter is that of step {origin}. Check the data and learning_rate."
            )
            report_event(params, "divergence", self.failure)
            run_context.request_stop()
            return
        self.factor *= self.rate_cut
        message = (
            f"{_NAME}: {reason}. Adapter and optimizer are those of step {origin} again; from now on the learning rate "
            f"is {self.factor:.4g} times that of the schedule."
        )
        report_event(params, "rollback", message)
        # Restoring an optimizer without a schedule has restored its rate.
        step.set_rate_factor(_NAME, self.factor)


def _is_left_to_loss_scale(step, outputs, loss):
    """Returns whether a dynamic loss scale handles the step: its gradients overflowed, but its loss did not."""
    is_dynamic = step.loss_scaling_manager is not None
    return is_dynamic and math.isfinite(loss) and bool(outputs[1].asnumpy()) and float(outputs[2].asnumpy()) > 1


class RunGuard(Rule):
    """A rule that watches for spikes of loss and gradient norm, skipped steps in a row, and a climbing loss.

    Logarithms make the limits independent of scale. From the last ``window`` values x of the loss or of the gradient
    norm, NaN and infinity left out:

        loss limit = max(exp(median(log x) + spike max(1.4826 MAD(log x), 0.1)), median(x) + 1)
        norm limit = exp(median(log x) + spike max(1.4826 MAD(log x), 0.3))

    A step above a limit should be skipped. A steadily climbing loss raises its own limit, so the smoothed loss
    s = median(last 16 losses) is also compared with b, the smallest s so far:

        ceiling = max(climb b, b exp(4 noise), b + 1),  noise = 1.4826 / sqrt(2) median(|log x_i - log x_(i-1)|)

    For the first 16 losses, s is the median of all losses so far, and noise is at least 0.25; then b restarts at s,
    since an early loss may have been small by chance.

    Args:
        spike (float): Number of deviations above the median that make a spike; at least 3. Default: 6.0.
        climb (float): Largest ratio of the smoothed loss to its best value; above 1. Default: 1.5.
        max_skipped (int): The run goes back after this number of skipped steps in a row; at least 2. Default: 4.
        window (int): Number of steps from which the limits are computed; above 16. Default: 32.

    Raises ConfigError if an argument is out of range.
    """

    remembered = ("losses", "norms", "best", "skipped")

    def __init__(self, spike: float = 6.0, climb: float = 1.5, max_skipped: int = 4, window: int = 32):
        check_number(spike, "spike", numbers(3))
        check_number(climb, "climb", Range("a number above 1", lambda v: 1 < v < math.inf))
        check_number(max_skipped, "max_skipped", whole_numbers(2))
        check_number(window, "window", Range(f"a whole number above {SMOOTHED}", lambda v: v > SMOOTHED, (int,)))
        self.spike = spike
        self.climb = climb
        self.max_skipped = max_skipped
        self.losses: Deque[float] = collections.deque(maxlen=window)
        self.norms: Deque[float] = collections.deque(maxlen=window)
        self.best = math.inf
        self.skipped = 0

    def step(self, loss: float, norm: float, skipped: bool) -> Optional[str]:
        """Judges a step; returns why the run should go back to an earlier state, or None if it should not.

        ``norm`` is the gradient norm before clipping.
        """
        if math.isfinite(loss):
            self.losses.append(loss)
        if math.isfinite(norm):
            self.norms.append(norm)
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped >= self.max_skipped:
            return f"{self.skipped} steps in a row were skipped"
        if skipped or not self.losses:
            return None
        smoothed = self._smoothed()
        self.best = min(self.best, smoothed)
        if smoothed > self._ceiling():
            return f"the loss climbed from {self.best:.4g} to {smoothed:.4g} (medians of up to {SMOOTHED} steps)"
        if len(self.losses) == SMOOTHED:
            self.best = smoothed
        return None

    @property
    def limits(self) -> Tuple[float, float]:
        """The loss and gradient norm above which the next step should be skipped; infinity for too few values."""
        loss = _limit(self.losses, self.spike, LEAST_SPREAD)
        norm = _limit(self.norms, self.spike, LEAST_NORM_SPREAD)
        return max(loss, float(np.median(self.losses or [0.0])) + MARGIN), norm

    @property
    def is_healthy(self) -> bool:
        """Whether the last step was done and the smoothed loss, if known, is nearer to its best than to the ceiling."""
        is_judged = max(len(self.losses), len(self.norms)) >= ENOUGH and not self.skipped
        if not self.losses:
            return is_judged
        return is_judged and self._smoothed() <= math.sqrt(self.best * self._ceiling())

    def forget(self) -> None:
        """Forgets all values, after a return to an earlier state or a change of the data."""
        self.losses.clear()
        self.norms.clear()
        self.best = math.inf
        self.skipped = 0

    def state(self) -> Dict[str, Any]:
        # JSON has no infinity.
        return {**super().state(), "best": self.best if math.isfinite(self.best) else None}

    def restore(self, state: Dict[str, Any]) -> None:
        super().restore({**state, "best": math.inf if state["best"] is None else state["best"]})

    def _smoothed(self):
        return float(np.median(list(self.losses)[-SMOOTHED:]))

    def _ceiling(self):
        steps = np.abs(np.diff(_logarithms(self.losses)))
        noise = _DEVIATION / math.sqrt(2) * float(np.median(steps)) if len(steps) else 0.0
        if len(self.losses) <= SMOOTHED:
            noise = max(noise, FIRST_NOISE)
        return max(self.climb * self.best, self.best * math.exp(NOISES * noise), self.best + MARGIN)


def _limit(values, spike, least):
    """Returns the limit ``spike`` spreads above the median of positive values; infinity if there are too few."""
    if len(values) < ENOUGH:
        return math.inf
    logarithms = _logarithms(values)
    median = np.median(logarithms)
    spread = max(_DEVIATION * float(np.median(np.abs(logarithms - median))), least)
    return math.exp(min(median + spike * spread, 700.0))


def _logarithms(values):
    return np.log(np.maximum(np.asarray(values, np.float64), _TINY))


class Snapshots:
    """The last good state of a run, on the host: at most two copies of its arrays.

    A state is known to be good only some steps later (by default 16, for RunGuard's smoothed loss), so the previous
    state is kept until then. Raises ConfigError if ``every``, the steps between copies, is less than 1.
    """

    def __init__(self, every: int, proven_after: int = SMOOTHED):
        check_number(every, "snapshot_steps", COUNT)
        self.every = max(every, proven_after)
        self.proven_after = proven_after
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
        """Returns the step and arrays of the last state known to be good at ``step``, and drops any other."""
        proven = [kept for kept in self._kept if step - kept[0] >= self.proven_after]
        self._kept = [(proven or self._kept)[-1 if proven else 0]]
        return self._kept[0]
