"""LossCurve: the losses of a run as JSON and as a picture."""

import json
import os

from mindformers.tools.utils import get_output_root_path, get_real_rank
from mindspore import Callback

from mindlora.common import atomic
from mindlora.errors import ConfigError
from mindlora.plugin.callbacks.common import loss_of, register
from mindlora.plugin.callbacks.held_out_loss import HeldOutLoss
from mindlora.plugin.log import logger


@register
class LossCurve(Callback):
    """Records the loss of every step, and what HeldOutLoss measures, and draws both: loss_curve.json, loss_curve.png.

    Args:
        directory (str): Where to write. Default: None, the output folder of the run.

    Raises:
        ConfigError: matplotlib is not installed.
    """

    def __init__(self, directory=None):
        super().__init__()
        try:
            import matplotlib  # noqa: F401  A run of hours must not end with this error.
        except ImportError as error:
            raise ConfigError(
                "LossCurve draws with matplotlib, which is not installed: pip install "
                "'mindlora[plot]', or take LossCurve out of callbacks."
            ) from error
        self.directory = directory or get_output_root_path()
        self.train = []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.train.append((params.cur_step_num, loss_of(params)))

    def on_train_end(self, run_context):
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
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"train": self.train, "held_out": held_out}, file)
        with atomic.replace_file(os.path.join(self.directory, "loss_curve.png")) as path:
            draw_loss(self.train, held_out, path)
        logger.info("Loss curve drawn: %s", os.path.join(self.directory, "loss_curve.png"))
