"""LossCurve: the losses of a run as JSON and as a plot."""

import json
import os
from typing import Optional

from mindformers.tools.utils import get_output_root_path, get_real_rank
from mindspore import Callback
from mindspore.train import RunContext

from mindlora.common import atomic
from mindlora.errors import ConfigError
from mindlora.plugin.callbacks.common import loss_of, register
from mindlora.plugin.callbacks.held_out_loss import HeldOutLoss
from mindlora.plugin.log import logger


@register
class LossCurve(Callback):
    """Records the loss of every step and what HeldOutLoss measures in loss_curve.json, and plots both.

    The plot is loss_curve.png. The two files are written when training ends.

    Args:
        directory (str): Folder to write to. Default: None, the output folder of the run.

    Raises:
        ConfigError: matplotlib is not installed.
    """

    def __init__(self, directory: Optional[str] = None):
        super().__init__()
        try:
            import matplotlib  # noqa: F401  if it is missing, this fails now and not after hours of training
        except ImportError as error:
            raise ConfigError(
                "LossCurve needs matplotlib, which is not installed: pip install "
                "'mindlora[plot]', or remove LossCurve from callbacks."
            ) from error
        self.directory = directory or get_output_root_path()
        self.train = []

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Records the loss of the step."""
        params = run_context.original_args()
        self.train.append((params.cur_step_num, loss_of(params)))

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
        from mindlora.training.loss_curve import draw_loss

        os.makedirs(self.directory, exist_ok=True)
        with atomic.replace_file(os.path.join(self.directory, "loss_curve.json")) as path:
            _write(path, {"train": self.train, "held_out": held_out})
        with atomic.replace_file(os.path.join(self.directory, "loss_curve.png")) as path:
            draw_loss(self.train, held_out, path)
        logger.info("Loss curve written to %s.", os.path.join(self.directory, "loss_curve.png"))


def _write(path, content):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
