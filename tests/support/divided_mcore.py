"""Trains small mcore models that are divided between the processes of a semi-automatic parallel run, or in one.

Started with a folder, the one in which one process has trained them, and the names of MODELS. Each is trained for some
steps, and a rank writes its losses and weights to NAME-RANK.npz there, and what LoraCheckpoint and write_slices save to
NAME/RANK.

One process trains a model without experts in PyNative, which compiles nothing.
"""

import importlib
import os
import sys

import mindspore as ms
import numpy as np
from mindformers.modules.transformer import TransformerOpParallelConfig
from mindformers.wrapper import wrapper
from mindspore import nn
from mindspore.communication import get_rank

from mindlora.training.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.training.launch import hooks  # noqa: F401
from mindlora.training.model import pet
from mindlora.training.model.loss_in_pieces import losses_of_head
from mindlora.training.model.network import base_of
from mindlora.training.resume import sharded_adapter
from mindlora.training.step import train_step
from tests.support import divided_heads, semi_automatic
from tests.support.mcore_networks import TINY, filled, mcore_context, scaled, with_adapters
from tests.support.mcore_pynative import pynative_operators
from tests.support.moe_networks import QWEN3_MOE

STEPS, SAVED, PIECE = divided_heads.STEPS, 2, divided_heads.PIECE
PET = {"lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": "all-linear"}
TRAINS = {"modules_to_save": ["lm_head"]}
EXPERTS = {"target_modules": ["linear_proj"], "target_parameters": ["mlp.experts"]}
# Two processes begin this one with the adapter that one process has saved on its way.
GOES_ON = "a Qwen3 whose head trains"
# How it is divided, changes of its sizes, and keys of pet_config.
MODELS = {
    GOES_ON: ("model_parallel", {}, TRAINS),
    "a Qwen3 with LoRA on its head": ("model_parallel", {}, {"target_modules": ["linear_fc2", "output_layer"]}),
    "a Qwen3-MoE": ("expert_parallel", QWEN3_MOE, EXPERTS),
}


def built(devices, axis, sizes, pet_keys):
    """Returns a tiny Qwen3 or Qwen3-MoE with adapters, the same at each call."""
    package = "qwen3_moe" if "num_experts" in sizes else "qwen3"
    name = "Qwen3Moe" if "num_experts" in sizes else "Qwen3"
    config = importlib.import_module(f"mindformers.models.{package}.configuration_{package}")
    model = importlib.import_module(f"mindformers.models.{package}.modeling_{package}_train")
    keys = {**PET, **pet_keys}
    # Experts are divided among the devices that rows are divided among.
    rows = devices if axis == "expert_parallel" else 1
    parallel = TransformerOpParallelConfig(**{"data_parallel": rows, axis: devices})
    with mcore_context():
        sizes = getattr(config, f"{name}Config")(**{**TINY, **sizes}, parallel_config=parallel)
        network = getattr(model, f"Training{name}ForCausalLM")(sizes)
        scaled(filled(network, 0), 0.5)
        if "adapter_path" in keys:
            return with_adapters(network, **keys)
        return scaled(filled(with_adapters(network, **keys), 0), 0.5)


class Losses(ms.Callback):
    """The losses of a run, as MindSpore hands them to its callbacks."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_step_end(self, run_context):
        self.losses.append(float(run_context.original_args().net_outputs[0].asnumpy()))


def train(network, saved, steps):
    """Trains on the batches of some steps; returns the losses, and by name what was trained."""
    wrapper.is_legacy_model = lambda: False
    optimizer = nn.SGD(network.trainable_params(), 0.05)
    step = train_step.LoraTrainOneStepCell(network, optimizer, loss_in_pieces=PIECE)
    assert losses_of_head(step) is not None
    batches = [[column.asnumpy() for column in divided_heads.batch(number)] for number in steps]
    columns = [np.concatenate(column) for column in zip(*batches)]
    dataset = ms.dataset.NumpySlicesDataset(tuple(columns), shuffle=False).batch(divided_heads.ROWS)
    losses = Losses()
    callbacks = [losses, LoraCheckpoint(directory=saved, save_steps=SAVED)]
    ms.Model(step).train(1, dataset, callbacks, dataset_sink_mode=False)
    layouts, slices = step.parameter_layout_dict, os.path.join(saved, os.pardir, "slices")
    if layouts:
        sharded_adapter.write_slices(slices, base_of(step), layouts, f"1_{len(steps)}")
    return losses.losses, {parameter.name: parameter.asnumpy() for parameter in network.trainable_params()}


def main(folder, alone, *names):
    os.environ.update(RUN_MODE="train", LOG_MF_PATH=os.path.join(folder, "log_mf"))
    devices, rank = int(os.environ.get("MS_WORKER_NUM", "1")), 0
    if devices > 1:
        semi_automatic.start()
        rank = get_rank()
        cells = importlib.import_module("tests.support.divided_cpu_cells")
        pet.use_mcore_cpu_cells = cells.use_divided_cpu_cells
        train_step.use_mcore_cpu_cells = lambda network: None
    for name in names:
        axis, sizes, keys = MODELS[name]
        begun = SAVED if devices > 1 and name == GOES_ON else 0
        if begun:
            keys = {**keys, "adapter_path": os.path.join(alone, name, "0", f"step_{begun}")}
        if devices == 1:
            # PyNative compiles the experts' gradients at each step, for longer than the whole graph takes.
            ms.set_context(mode=ms.GRAPH_MODE if "num_experts" in sizes else ms.PYNATIVE_MODE)
        with pynative_operators():
            network = built(devices, axis, sizes, keys)
            losses, weights = train(network, os.path.join(folder, name, str(rank)), range(begun, STEPS))
        np.savez(os.path.join(folder, f"{name}-{rank}.npz"), losses=losses, **weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
