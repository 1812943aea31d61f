"""ProgressBar: shows steps, losses, tokens per second and remaining time on stderr, as a bar or in lines."""

import os
import sys
import time

from mindformers.tools.utils import get_real_rank
from mindspore import Callback
from mindspore.train import RunContext
from tqdm import tqdm

from mindlora.training.callbacks.common import register, reported_metrics, step_record
from mindlora.training.resume import training_state

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"
_LINE = "{desc}: {n_fmt}/{total_fmt} steps ({percentage:.0f}%), {remaining} left{postfix}"
# Seconds between two lines in a file, if nothing else happens.
_SECONDS = 30.0


@register
class ProgressBar(Callback):
    """Shows steps, remaining time, loss, held-out loss and tokens per second on stderr while training, on rank 0.

    If stderr is not a terminal, a line is written every half minute, after the first and the last step, and after a
    step at which the held-out loss is measured or a guard or a schedule acts.

    Args:
        label (str): Text before the bar. Default: "training".
    """

    def __init__(self, label: str = "training"):
        super().__init__()
        self.label = label
        self.bar = self.held_out_loss = None
        self.in_lines = self.is_timed = False
        self.events = 0
        # The step of the last line, and when it was written; -inf: no line yet.
        self.line_step, self.line_time = -1, -float("inf")

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Opens the bar."""
        # Not when training begins: a resumed run may not know its step by then.
        if self.bar is not None:
            return
        params = run_context.original_args()
        shows = get_real_rank() == 0
        self.in_lines = shows and not sys.stderr.isatty()
        self.bar = tqdm(
            total=training_state.total_steps(params),
            initial=params.cur_step_num,
            desc=self.label,
            unit="step",
            disable=not shows,
            dynamic_ncols=True,
            # The lines are printed here; tqdm's own drawing between them is discarded.
            file=open(os.devnull, "w", encoding="utf-8") if self.in_lines else None,  # noqa: SIM115
            bar_format=_LINE if self.in_lines else _BAR,
        )

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Moves the bar to the step and shows what it measured."""
        if self.bar.disable:
            return
        params = run_context.original_args()
        record = step_record(params)
        measured = reported_metrics(params).get("held_out_loss")
        self.held_out_loss = self.held_out_loss if measured is None else measured
        shown = [f"loss {record.loss:.3f}"]
        if self.held_out_loss is not None:
            shown.append(f"held-out {self.held_out_loss:.3f}")
        shown += self._speed(record.tokens)
        self.bar.set_postfix_str(", ".join(shown), refresh=False)
        self._move_to(params.cur_step_num)
        events = len(params.get("training_events") or [])
        is_due = time.monotonic() - self.line_time >= _SECONDS
        if self.in_lines and (is_due or measured is not None or events > self.events):
            self._print_line()
        self.events = events

    def _move_to(self, step):
        if self.is_timed:
            self.bar.update(step - self.bar.n)
            return
        # The first step compiles and says nothing about the remaining steps, so the bar measures time from its end.
        self.is_timed = True
        self.bar.initial = self.bar.n = self.bar.last_print_n = step
        self.bar.start_t = self.bar.last_print_t = time.time()
        self.bar.refresh()

    def _speed(self, tokens):
        """Returns the tokens per second by the bar's clock, once a step has been timed."""
        timed = self.bar.format_dict
        steps = timed["n"] - timed["initial"]
        steps_per_second = timed["rate"] or (steps and steps / timed["elapsed"])
        return [] if tokens is None or not steps_per_second else [f"{tokens * steps_per_second:,.0f} tokens/s"]

    def _print_line(self):
        self.line_step, self.line_time = self.bar.n, time.monotonic()
        print(self.bar, file=sys.stderr, flush=True)

    def on_train_end(self, run_context: RunContext) -> None:
        """Closes the bar."""
        if self.bar is None:
            return
        if self.in_lines and self.line_step < self.bar.n:
            self._print_line()
        self.bar.close()
        if self.in_lines:
            self.bar.fp.close()
