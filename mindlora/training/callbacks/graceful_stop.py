"""GracefulStop: on Ctrl-C or SIGTERM, finishes the step, saves the run, and says how to resume."""

import os
import signal
import threading
import time
from typing import Any

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.core.errors import RunStopped
from mindlora.core.interrupts import entered
from mindlora.training.callbacks.common import register, report_event, step_record
from mindlora.training.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.training.model.network import train_step_of
from mindlora.training.resume import training_state
from mindlora.training.resume.collectives import rank_count, wait_for_all_ranks

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
