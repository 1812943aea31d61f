"""Training runs in this process with given losses, for the tests of what LoraCheckpoint saves and resumes."""

import os
import types

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora

STEPS_PER_EPOCH = 5


class Model(nn.Cell):
    """Replaces a MindFormers model: a linear cell with an adapter, and a configuration."""

    def __init__(self, dropout=0.0, weight=0.5):
        super().__init__()
        self.wq = nn.Dense(3, 3, weight_init=Tensor(np.full((3, 3), weight, np.float32)))
        self.config = types.SimpleNamespace()
        config = LoraConfig(lora_rank=2, lora_alpha=4, lora_dropout=dropout, target_modules="wq")
        apply_lora(self, config)
        freeze_base(self)


class ScriptedStep(nn.Cell):
    """A train step that trains nothing: its loss is the mean of the data."""

    def __init__(self, network, optimizer=nn.AdamWeightDecay):
        super().__init__(auto_prefix=False)
        self.network = network
        self.optimizer = optimizer(network.trainable_params())

    def construct(self, loss):
        return loss.mean()


class MarkAdapter(ms.Callback):
    """Writes the step number into B, so that a saved adapter shows at which step it was saved."""

    def on_train_step_begin(self, run_context):
        params = run_context.original_args()
        params.train_network.network.wq.mindpet_delta_lora_b.set_data(
            Tensor(np.full((3, 2), params.cur_step_num, np.float32))
        )


class Report(ms.Callback):
    """Reports a metric with given values: step -> value."""

    def __init__(self, name, values):
        super().__init__()
        self.name, self.values = name, values

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        params["eval_results"] = {}
        if params.cur_step_num in self.values:
            params["eval_results"] = {self.name: self.values[params.cur_step_num]}


class StopAt(ms.Callback):
    """Stops a run after a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == self.step:
            run_context.request_stop()


def train(callbacks, losses, epochs=1, skip=0, step=None):
    """Runs MindSpore's own training loop over the losses of one epoch, in each epoch."""
    dataset = ms.dataset.NumpySlicesDataset(np.asarray(losses, np.float32), shuffle=False).batch(1)
    if skip:
        dataset.set_init_step(skip)
    step = step or ScriptedStep(Model())
    ms.Model(step).train(epochs, dataset, [MarkAdapter(), *callbacks], dataset_sink_mode=False)


def marked_step(folder):
    """Returns the step at which the adapter in ``folder`` was saved, after loading it."""
    model = Model()
    load_lora(model, str(folder))
    return int(model.wq.mindpet_delta_lora_b.asnumpy()[0, 0])


def folders(directory):
    """Returns what a folder holds, step_10 after step_9."""
    return sorted(os.listdir(directory), key=lambda name: (len(name), name))
