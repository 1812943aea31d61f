"""MindFormers' own LoRA, for scale.py: its Trainer trains, and no module of mindlora is imported.

python scale_mindformers.py YAML TIMES     writes when the first step began and each step ended to TIMES
"""

import json
import os
import sys
import time

from mindformers.core.context import build_context
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindformers.trainer import Trainer
from mindformers.utils.file_utils import set_output_path
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Callback, ops


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class CpuStep(MFTrainOneStepCell):
    """MindFormers' train step, with CPU operators for the overflow check."""

    def start_overflow_check(self, pre_cond, compute_input):
        """Returns the inputs; there is no status to clear."""
        return pre_cond, compute_input

    def get_overflow_status(self, status, compute_output):
        """Returns whether a gradient is not finite."""
        total = status * 0
        for gradient in compute_output:
            total = total + ops.square(gradient).sum()
        return ops.logical_not(ops.isfinite(total))


@MindFormerRegister.register(MindFormerModuleType.CALLBACK, legacy=True)
class StepTimes(Callback):
    """A callback that writes when the first step began and each step ended."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.times = []

    def on_train_step_begin(self, run_context):
        """Records the beginning of the first step."""
        if not self.times:
            self.times.append(time.time())

    def on_train_step_end(self, run_context):
        """Records the end of a step, once its loss is computed."""
        run_context.original_args().net_outputs[0].asnumpy()
        self.times.append(time.time())
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(self.times, file)


def main() -> None:
    """Trains according to the YAML."""
    path, times = sys.argv[1:]
    config = MindFormerConfig(path)
    config.runner_wrapper = MindFormerConfig(
        type="CpuStep", scale_sense=1.0, use_clip_grad=True, max_grad_norm=1.0, local_norm=False
    )
    config.callbacks = [MindFormerConfig(type="MFLossMonitor"), MindFormerConfig(type="StepTimes", path=times)]
    set_output_path(os.path.join(os.path.dirname(path), "output_mindformers"))
    build_context(config)
    Trainer(config).train()


if __name__ == "__main__":
    main()
