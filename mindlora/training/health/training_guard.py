"""TrainingGuard: skips bad steps, goes back to the last good state, and ends a run that cannot be saved."""

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
# The smoothed loss is the median of this many losses, or of all while there are fewer.
SMOOTHED = 16
# Values that a limit needs.
ENOUGH = 8
# The spreads of log(loss) and log(norm) are taken to be at least this, so that a steady run is not stopped by small
# changes. With LoRA the norm grows while B does.
LEAST_SPREAD = 0.1
LEAST_NORM_SPREAD = 0.3
# A loss that lies less than this above what is usual, in nats per token, is never a fault.
MARGIN = 1.0
# The smoothed loss may rise by NOISES times the noise of one step, which is taken as FIRST_NOISE at first.
NOISES = 4.0
FIRST_NOISE = 0.25
# A normal distribution's standard deviation, divided by its median absolute deviation.
_DEVIATION = 1.4826
_TINY = 1e-12


@register
class TrainingGuard(Callback):
    """Watches loss and gradient norm; skips bad steps, goes back, lowers the rate, and ends a run in the last resort.

    1. A step whose loss or gradient norm is NaN, infinite or a spike is skipped: it changes neither the adapter nor the
       optimizer. RunGuard has the equations of what a spike is.
    2. After ``max_skipped`` such steps in a row, or when the loss has climbed far above its best without a spike, the
       adapter and the optimizer become again what they were when the run was last healthy (a copy on the host), and the
       learning rate is multiplied by ``rate_cut``. The data goes on, so a bad batch does not come again.
    3. If that has happened ``max_rollbacks`` times and is needed again, the run goes back once more, LoraCheckpoint
       saves this last good state, and the run ends with DivergenceError.

    All ranks see the same loss and norm, and decide alike. With a dynamic loss scale, an overflow while the scale is
    above 1 lowers the scale and is not a fault; nor is a step in which no token counts. After a resume, the state that
    was resumed is the last good one.

    Args:
        max_skipped (int): The run goes back after this number of skipped steps in a row; at least 2. Default: 4.
        max_rollbacks (int): How many times the run may go back. Default: 5.
        rate_cut (float): Factor of the learning rate each time; above 0 and at most 1. Default: 0.3.
        snapshot_steps (int): Steps between copies of the state; at least 16 are taken. Default: 50.
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
        """Copies the state at which the run begins, and sets the limits and the rate that a resumed run had."""
        # Not when training begins: a resumed run may not have its state by then.
        params = run_context.original_args()
        step = controlled_step(params, _NAME)
        if self.snapshots.is_empty:
            self.snapshots.add(params.cur_step_num, copy_state(step))
            step.set_limits(*self.guard.limits)
            step.set_rate_factor(_NAME, self.factor)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Judges the step, goes back if it must, and sets the limits of the next step."""
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
        # The loss of a policy says nothing of how well it does: the guard then knows gradient norms alone.
        loss = record.loss if record.loss_falls else math.nan
        reason = self.guard.step(loss, record.gradient_norm, record.skipped)
        if reason is not None:
            self._go_back(run_context, step, reason)
        elif self.snapshots.is_due(params.cur_step_num) and self.guard.is_healthy:
            self.snapshots.add(params.cur_step_num, copy_state(step))
        step.set_limits(*self.guard.limits)

    def __exit__(self, *error: Any) -> None:
        """Raises DivergenceError if the guard has ended the run; by now the other callbacks have saved everything."""
        if self.failure is not None and error[0] is None:
            # Else msrun would kill the others while they save.
            wait_for_all_ranks()
            raise DivergenceError(self.failure)

    def training_state(self) -> Dict[str, Any]:
        """Returns what a resumed run needs, as JSON values."""
        return {"guard": self.guard.state(), "rollbacks": self.rollbacks, "factor": self.factor}

    def restore_training_state(self, state: Dict[str, Any]) -> None:
        """Restores what ``training_state`` returned."""
        self.guard.restore(state["guard"])
        self.rollbacks = state["rollbacks"]
        self.factor = state["factor"]

    def _go_back(self, run_context, step, reason):
        """Puts the last good state back, and cuts the rate or ends the run."""
        params = run_context.original_args()
        origin, arrays = self.snapshots.go_back(params.cur_step_num)
        put_back(step, arrays)
        self.guard.forget()
        self.rollbacks += 1
        if self.rollbacks > self.max_rollbacks:
            self.failure = (
                f"{_NAME} ended the run at step {params.cur_step_num}: {reason}, after {self.max_rollbacks} returns "
                f"to an earlier state. The adapter is that of step {origin}. Look at the data and at learning_rate."
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
    """Returns whether a dynamic loss scale deals with the step: its gradients overflowed, though its loss did not."""
    is_dynamic = step.loss_scaling_manager is not None
    return is_dynamic and math.isfinite(loss) and bool(outputs[1].asnumpy()) and float(outputs[2].asnumpy()) > 1


class RunGuard(Rule):
    """Watches loss and gradient norm; sees spikes, steps skipped in a row, and a loss that climbs steadily.

    All is computed with logarithms, so that it is the same at every scale. From the last ``window`` values x of the
    loss or of the gradient norm, NaN and infinity left out:

        loss limit = max(exp(median(log x) + spike max(1.4826 MAD(log x), 0.1)), median(x) + 1)
        norm limit = exp(median(log x) + spike max(1.4826 MAD(log x), 0.3))

    A step above a limit should be skipped. A loss that climbs steadily takes its limit along. So the smoothed loss
    s = median(last 16 losses) is compared with b, the smallest s so far:

        ceiling = max(climb b, b exp(4 noise), b + 1),  noise = 1.4826 / sqrt(2) median(|log x_i - log x_(i-1)|)

    For the first 16 losses, s is the median of all so far, and noise at least 0.25; then b starts again with s, as one
    of the first may have been small by chance.

    Args:
        spike (float): How many deviations above the median are a spike; at least 3. Default: 6.0.
        climb (float): How many times its best the smoothed loss may be; above 1. Default: 1.5.
        max_skipped (int): The run goes back after this number of skipped steps in a row; at least 2. Default: 4.
        window (int): Steps that limits are made from; above 16. Default: 32.

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
        """Looks at a step; returns why the run should go back to an earlier state, or None if it should not.

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
        """The loss and the gradient norm above which the next step should be skipped; infinity while too little is
        known."""
        loss = _limit(self.losses, self.spike, LEAST_SPREAD)
        norm = _limit(self.norms, self.spike, LEAST_NORM_SPREAD)
        return max(loss, float(np.median(self.losses or [0.0])) + MARGIN), norm

    @property
    def is_healthy(self) -> bool:
        """Whether the last step was done and the smoothed loss, if losses are known, is nearer to its best than to the
        ceiling."""
        is_judged = max(len(self.losses), len(self.norms)) >= ENOUGH and not self.skipped
        if not self.losses:
            return is_judged
        return is_judged and self._smoothed() <= math.sqrt(self.best * self._ceiling())

    def forget(self) -> None:
        """Starts over, after a return to an earlier state or a change of the data."""
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

    A state is known to be good only some steps later, so the one before it is kept until then: by default 16 steps, for
    the smoothed loss of RunGuard. Raises ConfigError if ``every``, the steps between copies, is less than 1.
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
        """Returns the step and the arrays of the last good state, seen from ``step``; it is the only one kept now."""
        proven = [kept for kept in self._kept if step - kept[0] >= self.proven_after]
        self._kept = [(proven or self._kept)[-1 if proven else 0]]
        return self._kept[0]
