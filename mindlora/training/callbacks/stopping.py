"""Callbacks that end a run before its last step: a loss that no longer improves, or a signal."""

import math
import os
import signal
import threading
import time
from typing import Any, Optional

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.core.errors import RunStopped
from mindlora.core.fields import COUNT, NOT_NEGATIVE, check_number
from mindlora.core.interrupts import entered
from mindlora.training.callbacks.common import (
    Rule,
    RuleCallback,
    check_is_measured,
    check_mode,
    register,
    report_event,
    reported_metrics,
    step_record,
)
from mindlora.training.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.training.model.network import train_step_of
from mindlora.training.resume import training_state
from mindlora.training.resume.collectives import rank_count, wait_for_all_ranks


@register
class EarlyStopping(RuleCallback):
    """Ends a run when the held-out loss, or another metric, has not improved in ``patience`` measurements in a row.

    LoraCheckpoint keeps the best adapter if its best_metric is the same metric. All ranks see the same held-out loss,
    and stop at the same step.

    Args:
        patience (int): Measurements in a row without an improvement after which the run ends. Default: 3.
        min_delta (float): By how much a measurement must be better than the best one. Default: 0.0.
        metric (str): ``held_out_loss``, or another metric that a callback reports. Default: "held_out_loss".
        mode (str): "min" if a smaller metric is better, "max" if a larger one is. Default: "min".

    Raises:
        ConfigError: An argument is out of range, or nothing measures held_out_loss.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0, metric: str = "held_out_loss", mode: str = "min"):
        super().__init__()
        self.metric = metric
        self.rule = EarlyStop(patience, min_delta, mode)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that the metric is measured."""
        check_is_measured(run_context.original_args(), "EarlyStopping", self.metric)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Counts a measurement, and ends the run if patience has run out."""
        params = run_context.original_args()
        value = reported_metrics(params).get(self.metric)
        if value is None or not self.rule.step(params.cur_step_num, value):
            return
        if params.cur_step_num < training_state.total_steps(params):
            best = "was never finite" if self.rule.best is None else f"has been {self.rule.best:.6g} at best"
            message = (
                f"EarlyStopping: {self.metric} {best} (step {self.rule.best_step}) and has not improved in "
                f"{self.rule.waited} measurements. The run ends."
            )
            report_event(params, "early_stop", message)
        run_context.request_stop()


class EarlyStop(Rule):
    """A rule that counts the measurements since the best one.

    A measurement m improves on the best one b if m < b - min_delta (mode min) or m > b + min_delta (mode max). NaN does
    not improve.
    """

    remembered = ("best", "best_step", "waited")

    def __init__(self, patience: int, min_delta: float = 0.0, mode: str = "min"):
        check_number(patience, "patience", COUNT)
        check_number(min_delta, "min_delta", NOT_NEGATIVE)
        check_mode("mode", mode)
        self.patience = patience
        self.min_delta = min_delta
        self.sign = 1 if mode == "min" else -1
        self.best: Optional[float] = None
        self.best_step = self.waited = 0

    def step(self, step: int, metric: float) -> bool:
        """Counts the measurement of a training step; returns whether it is time to stop."""
        best = math.inf if self.best is None else self.sign * self.best
        if self.sign * metric < best - self.min_delta:
            self.best = metric
            self.best_step = step
            self.waited = 0
        else:
            self.waited += 1
        return self.waited >= self.patience


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Some programs send the same signal to a process and to its group; that is not a second request.
_SAME_REQUEST_SECONDS = 1.0


@register
class GracefulStop(Callback):
    """On SIGINT (Ctrl-C) or SIGTERM, finishes the step, saves the run with LoraCheckpoint, and ends it.

    The run ends with RunStopped, which names the step folder and says how to resume; mindlora-run then has the exit
    code 130 (SIGINT) or 143 (SIGTERM), like any program that these signals end: a stopped run is not a finished one. A
    second signal, at least one second later, ends the process at once. Under msrun, it is enough that one worker gets
    the signal; all stop at the same step. mindlora-run adds this callback to every training run.

    Signals are handled only where Python allows it, in the main thread; the former handlers are restored when training
    ends. A signal that the process ignores, such as SIGINT in the background of a shell, stays ignored.
    """

    def __init__(self):
        super().__init__()
        self.received = self.outcome = self.interrupts = None
        self.since = 0.0
        self.before = {}

    def on_train_begin(self, run_context: RunContext) -> None:
        """Installs the signal handlers."""
        step = train_step_of(run_context.original_args().train_network)
        can_tell_others = step is not None and not step.is_mindformers_step
        if threading.current_thread() is threading.main_thread() and (can_tell_others or rank_count() == 1):
            # A shell makes background programs ignore SIGINT, so that Ctrl-C reaches only the foreground program.
            handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self.interrupts = entered()
            if self.interrupts:
                # mindlora-run itself waits for Ctrl-C, because MindSpore replaces a SIGINT handler while a graph runs.
                handled = [number for number in handled if number != signal.SIGINT]
                self.interrupts.hand_to(lambda: self._receive(signal.SIGINT))
            self.before = {number: signal.signal(number, self._receive) for number in handled}

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Notifies the other ranks of a signal."""
        if self.received is not None and rank_count() > 1:
            train_step_of(run_context.original_args().train_network).request_stop()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Stops the run if this rank, or another one before this step, got a signal."""
        params = run_context.original_args()
        if not (step_record(params).stop or (self.received is not None and rank_count() == 1)):
            return
        step = params.cur_step_num
        last = training_state.total_steps(params)
        run_context.request_stop()
        if step < last:
            number = signal.Signals(self.received or signal.SIGTERM)
            message = f"{number.name} stopped the run after step {step} of {last}. {_how_to_go_on(params)}"
            self.outcome = RunStopped(message, 128 + number)
            report_event(params, "stop", message)

    def __exit__(self, *error: Any) -> None:
        """Restores the former handlers, and raises RunStopped if a signal stopped the run."""
        self._restore()
        if self.outcome is not None and error[0] is None:
            # Otherwise, msrun would kill the other workers while they save.
            wait_for_all_ranks()
            raise self.outcome

    def _receive(self, number, _=None):
        now = time.monotonic()
        if self.received is None:
            self.received = number
            self.since = now
            # print() is not reentrant, and the signal may arrive while it runs.
            os.write(
                2, b"\nmindlora: the step is finished and saved, then the run ends. A second signal ends it now.\n"
            )
        elif now - self.since >= _SAME_REQUEST_SECONDS:
            if self.interrupts and number == signal.SIGINT:
                self.interrupts.leave()
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self):
        if self.interrupts:
            self.interrupts.hand_to(None)
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self.before = {}


def _how_to_go_on(params):
    if "how_to_go_on" in params:
        return params.how_to_go_on
    folders = [
        os.path.join(callback.directory, f"{training_state.STEP_PREFIX}{params.cur_step_num}")
        for callback in params.list_callback
        if isinstance(callback, LoraCheckpoint)
    ]
    if not folders:
        return "Nothing was saved: callbacks has no LoraCheckpoint."
    return (
        f"It is saved in {folders[0]}. To resume, repeat the command with --resume, or set resume: True in "
        "LoraCheckpoint."
    )
