"""LossCurve: the losses of a run as JSON and as a plot."""

import importlib.util
import json
import math
import os
from statistics import fmean
from typing import List, Optional, Tuple

from mindformers.tools.utils import get_output_root_path, get_real_rank
from mindspore import Callback
from mindspore.train import RunContext

from mindlora.core import atomic
from mindlora.training.callbacks.common import loss_of, register
from mindlora.training.held_out.held_out_loss import HeldOutLoss
from mindlora.training.log import logger


@register
class LossCurve(Callback):
    """Records the loss of every step and what HeldOutLoss measures in loss_curve.json, and plots both.

    The plot is loss_curve.png, for which matplotlib must be installed. The files are written when training ends.

    Args:
        directory (str): Folder to write to. Default: None, the output folder of the run.
    """

    def __init__(self, directory: Optional[str] = None):
        super().__init__()
        self.plots = importlib.util.find_spec("matplotlib") is not None
        if not self.plots:
            logger.warning(
                "matplotlib is not installed, so LossCurve writes loss_curve.json without its picture. The run's "
                "report.html shows the same curves; for the picture: pip install 'mindlora[plot]'."
            )
        self.directory = directory or get_output_root_path()
        self.train = []

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Records the loss of the step, if it is a number."""
        params = run_context.original_args()
        loss = loss_of(params)
        # JSON has no NaN and no infinity.
        if math.isfinite(loss):
            self.train.append((params.cur_step_num, loss))

    def on_train_end(self, run_context: RunContext) -> None:
        """Writes both files, on rank 0."""
        if get_real_rank() != 0 or not self.train:
            return
        held_out = [
            point
            for callback in run_context.original_args().list_callback
            if isinstance(callback, HeldOutLoss)
            for point in callback.measured
        ]
        os.makedirs(self.directory, exist_ok=True)
        with atomic.replace_file(os.path.join(self.directory, "loss_curve.json")) as path:
            _write(path, {"train": self.train, "held_out": held_out})
        if self.plots:
            with atomic.replace_file(os.path.join(self.directory, "loss_curve.png")) as path:
                draw_loss(self.train, held_out, path)
        name = "loss_curve.png" if self.plots else "loss_curve.json"
        logger.info("Loss curve written to %s.", os.path.join(self.directory, name))


def _write(path, content):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def draw_loss(train: List[Tuple[int, float]], held_out: List[Tuple[int, float]], path: str) -> None:
    """Plots (step, loss) of training, its mean over nine neighbouring steps, and the held-out loss, to a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, losses = zip(*train)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=110)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training loss, each step")
    smooth = [fmean(losses[max(0, i - 4) : i + 5]) for i in range(len(losses))]
    axes.plot(steps, smooth, color="tab:blue", linewidth=2, label="training loss, mean of 9 steps")
    if held_out:
        axes.plot(*zip(*held_out), color="tab:orange", marker="o", linewidth=2, label="held-out loss")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy (nats per token)")
    axes.set_title("LoRA fine-tuning")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
