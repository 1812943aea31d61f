"""ProgressBar: steps, losses, tokens per second and remaining time on stderr."""

from mindformers.tools.utils import get_real_rank
from mindspore import Callback
from mindspore.train import RunContext
from tqdm import tqdm

from mindlora.training.callbacks.common import register, reported_metrics, step_record
from mindlora.training.resume import training_state


@register
class ProgressBar(Callback):
    """Shows steps, remaining time, loss, held-out loss and tokens per second on stderr while training, on rank 0.

    Args:
        label (str): Text before the bar. Default: "training".
    """

    def __init__(self, label: str = "training"):
        super().__init__()
        self.label = label
        self.bar = self.held_out_loss = None

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Opens the bar."""
        # Not when training begins: a resumed run may not know its step by then.
        if self.bar is not None:
            return
        params = run_context.original_args()
        self.bar = tqdm(
            total=training_state.total_steps(params),
            initial=params.cur_step_num,
            desc=self.label,
            unit="step",
            disable=get_real_rank() != 0,
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}",
        )

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Moves the bar to the step and shows what it measured."""
        if self.bar.disable:
            return
        params = run_context.original_args()
        record = step_record(params)
        self.held_out_loss = reported_metrics(params).get("held_out_loss", self.held_out_loss)
        shown = [f"loss {record.loss:.3f}"]
        if self.held_out_loss is not None:
            shown.append(f"held-out {self.held_out_loss:.3f}")
        shown += self._speed(record.tokens)
        self.bar.set_postfix_str(", ".join(shown), refresh=False)
        self.bar.update(params.cur_step_num - self.bar.n)

    def _speed(self, tokens):
        """Returns the tokens per second as the bar measures time, once a step has been timed."""
        timed = self.bar.format_dict
        steps_per_second = timed["rate"] or (timed["n"] - timed["initial"]) / timed["elapsed"]
        return [] if tokens is None or not steps_per_second else [f"{tokens * steps_per_second:,.0f} tokens/s"]

    def on_train_end(self, run_context: RunContext) -> None:
        """Closes the bar."""
        if self.bar is not None:
            self.bar.close()
