"""Runs MindFormers' own LoRA, as a script in its own process: mindlora's pet_type is never registered here.

It reads config.yaml (which loads initial.ckpt), base.ckpt, ours.ckpt and probe.npy from the given folder. It writes
initial.ckpt, the output of a training run, and logits.npz: of the trained network, and of the base with ours.ckpt.
"""

import os
import sys

import mindspore as ms
import numpy as np
from mindformers.core import CheckpointMonitor
from mindformers.core.context import build_context
from mindformers.models.build_model import build_network
from mindformers.pet import pet_model
from mindformers.pet.models.lora import LoraModel
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindformers.trainer import Trainer
from mindformers.utils.file_utils import set_output_path

# The train step that runs on a CPU, and RunReport; not mindlora.training.launch.hooks.
from mindlora.training.callbacks import registry  # noqa: F401  importing registers their classes
from mindlora.training.step import train_step  # noqa: F401  importing registers their classes


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class SecondCheckpointMonitor(ms.Callback):
    """A second CheckpointMonitor: if a YAML names two of the same class, MindSpore keeps only one."""

    def __init__(self, **arguments):
        super().__init__()
        self.monitor = CheckpointMonitor(**arguments)

    def on_train_step_end(self, run_context):
        self.monitor.on_train_step_end(run_context)


def main(folder):
    os.chdir(folder)
    config = MindFormerConfig("config.yaml")
    set_output_path(config.output_dir)
    build_context(config)
    network = build_network(MindFormerConfig("config.yaml").model)
    load(network, "base.ckpt")
    ms.save_checkpoint(network, "initial.ckpt")
    Trainer(config).train()

    trained = os.path.join(config.output_dir, "checkpoint", "rank_0", "full_rank_0-5_10.ckpt")
    probe = ms.Tensor(np.load("probe.npy"))
    np.savez(
        "logits.npz",
        trained=logits_of(network, probe, trained),
        ours=logits_of(network, probe, "base.ckpt", "ours.ckpt"),
    )
    assert "mindlora.training.launch.hooks" not in sys.modules
    assert pet_model.PET_TYPE_TO_MODEL_MAPPING["lora"] is LoraModel and type(network.network) is LoraModel


def logits_of(network, probe, *checkpoints):
    """Loads checkpoints one after the other and returns the logits of the network."""
    for checkpoint in checkpoints:
        load(network, checkpoint)
    network.set_train(False)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return network(probe)[0].asnumpy()


def load(network, checkpoint):
    """Loads a checkpoint into a model with adapters, as MindFormers does."""
    network.config.checkpoint_name_or_path = checkpoint
    network.load_checkpoint(network.config)


if __name__ == "__main__":
    main(sys.argv[1])
