"""TrainingGuard: skips bad steps, goes back to the last good state, and ends a run that cannot be saved."""

import math
from typing import Any, Dict

import numpy as np
from mindspore import Callback, Parameter, Tensor, ops
from mindspore.train import RunContext

from mindlora.common.fields import COUNT, FACTOR, check_number
from mindlora.errors import DivergenceError
from mindlora.plugin.callbacks.common import register, report_event, step_record
from mindlora.plugin.callbacks.step_control import controlled_step
from mindlora.plugin.resume.ranks import wait_for_all_ranks
from mindlora.plugin.resume.training_state import state_parameters
from mindlora.training.guard import RunGuard, Snapshots

_NAME = "TrainingGuard"


@register
class TrainingGuard(Callback):
    """Watches loss and gradient norm; skips bad steps, goes back, lowers the rate, and ends a run in the last resort.

    1. A step whose loss or gradient norm is NaN, infinite or a spike is skipped: it changes neither the adapter nor the
       optimizer. mindlora.training.guard.RunGuard has the equations of what a spike is.
    2. After ``max_skipped`` such steps in a row, or when the loss has climbed far above its best without a spike, the
       adapter and the optimizer become again what they were when the run was last healthy (a copy on the host), and the
       learning rate is multiplied by ``rate_cut``. The data goes on, so a bad batch does not come again.
    3. If that has happened ``max_rollbacks`` times and is needed again, the run goes back once more, LoraCheckpoint
       saves this last good state, and the run ends with DivergenceError.

    All ranks see the same loss and norm, and decide alike. With a dynamic loss scale, an overflow while the scale is
    above 1 lowers the scale and counts as no fault. After a resume, the state that was resumed is the last good one.

    Args:
        max_skipped (int): So many steps skipped in a row are too many; at least 2. Default: 4.
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
        self.guard, self.snapshots = RunGuard(max_skipped=max_skipped, **settings), Snapshots(snapshot_steps)
        self.max_rollbacks, self.rate_cut = max_rollbacks, rate_cut
        self.rollbacks, self.factor, self.failure = 0, 1.0, None

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Copies the state at which the run begins, and sets the limits and the rate that a resumed run had."""
        # Not when training begins: a resumed run may not have its state by then.
        params = run_context.original_args()
        step = controlled_step(params, _NAME)
        if self.snapshots.is_empty:
            self.snapshots.add(params.cur_step_num, _copies(step))
            step.set_limits(*self.guard.limits)
            step.set_rate_factor(_NAME, self.factor)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Judges the step, goes back if it must, and sets the limits of the next step."""
        params = run_context.original_args()
        step, record = controlled_step(params, _NAME), step_record(params)
        if _is_left_to_loss_scale(step, params.net_outputs, record.loss):
            return
        if record.skipped:
            usual, highest = self.guard.limits
            message = (
                f"{_NAME}: the step was skipped: loss {record.loss:.4g} (limit {usual:.4g}), "
                f"gradient norm {record.gradient_norm:.4g} (limit {highest:.4g})."
            )
            report_event(params, "skipped_step", message)
        reason = self.guard.step(record.loss, record.gradient_norm, record.skipped)
        if reason is not None:
            self._go_back(run_context, step, reason)
        elif self.snapshots.is_due(params.cur_step_num) and self.guard.is_healthy:
            self.snapshots.add(params.cur_step_num, _copies(step))
        step.set_limits(*self.guard.limits)

    def __exit__(self, *error: Any) -> None:
        """Raises DivergenceError if the guard has ended the run; by now the other callbacks have saved everything."""
        if self.failure is not None and error[0] is None:
            # Else msrun would kill the others while they save.
            wait_for_all_ranks()
            raise DivergenceError(self.failure)

    def training_state(self) -> dict:
        """Returns what a resumed run needs, as JSON values."""
        return {"guard": self.guard.state(), "rollbacks": self.rollbacks, "factor": self.factor}

    def restore_training_state(self, state: dict) -> None:
        """Takes over what ``training_state`` returned."""
        self.guard.restore(state["guard"])
        self.rollbacks, self.factor = state["rollbacks"], state["factor"]

    def _go_back(self, run_context, step, reason):
        """Puts the last good state back, and cuts the rate or ends the run."""
        params = run_context.original_args()
        origin, arrays = self.snapshots.go_back(params.cur_step_num)
        for parameter in _state(step):
            # Not set_data: the graph would keep the moments, which it uses only in the branch of steps that count.
            ops.assign(parameter, Tensor(arrays[parameter.name], parameter.dtype))
        unsent = step.exchange.unsent() if step.exchange is not None else None
        if unsent is not None:
            # What this rank has not sent yet is from the steps that are undone. -0.0, since x + -0.0 is x for every x.
            ops.assign(unsent, Tensor(np.full(unsent.shape, -0.0, np.float32)))
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


def _state(step):
    """Returns the parameters of the adapter and the optimizer; a loss scale is not part of what was good."""
    manager = step.loss_scaling_manager
    scale = {step.scale_sense.name} if isinstance(step.scale_sense, Parameter) else set()
    scale.update(p.name for p in (manager.get_parameters() if manager is not None else ()))
    trained = [p for p in step.get_parameters() if p.requires_grad]
    by_name: Dict[str, Parameter] = {p.name: p for p in [*trained, *state_parameters(step)]}
    return [parameter for name, parameter in by_name.items() if name not in scale]


def _copies(step) -> Dict[str, np.ndarray]:
    return {p.name: p.asnumpy().copy() for p in _state(step)}
