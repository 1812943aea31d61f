"""Many short trainings of stories260K: a train step is compiled once, whatever the rate, the seed and the weights."""

import os
from typing import Any, Dict, Optional

import numpy as np

from bench.science_data import IGNORED, Rows, Task

BATCH_SIZE, HELD_OUT_BATCH = 4, 32
# As a YAML of this project has it.
MAX_GRADIENT_NORM = 1.0
Weights = Dict[str, np.ndarray]


class Trainings:
    """Trainings of one base with one adapter, or in full if there is none.

    Each begins with the base's weights and B zero, and takes its rows in an order that its seed draws.
    """

    def __init__(self, base: str, length: int, lora: Optional[Dict[str, Any]] = None):
        import mindspore as ms
        from mindspore import nn

        from mindlora.plugin.callbacks.held_out_loss import HeldOutLossCell
        from mindlora.plugin.graph.train_step import LoraTrainOneStepCell

        ms.set_seed(0)
        self.network = build(base, length, lora)
        self.step = LoraTrainOneStepCell(
            self.network,
            nn.Adam(self.network.trainable_params(), 1.0),
            use_clip_grad=True,
            max_grad_norm=MAX_GRADIENT_NORM,
            scale_sense=1.0,
        )
        self.held_out = HeldOutLossCell(self.network, IGNORED)
        self.parameters = {p.name: p for p in self.step.get_parameters()}
        self.initial = {name: p.asnumpy().copy() for name, p in self.parameters.items()}

    @property
    def trained(self) -> int:
        """How many numbers train."""
        return sum(p.size for p in self.network.trainable_params())

    def train(self, task: Task, rate: float, seed: int, steps: int) -> float:
        """Trains once, and returns the held-out loss after the last step."""
        rng = np.random.default_rng(seed)
        self.network.set_train(True)
        self.begin(self.drawn(rng))
        self.step.set_rate_factor("science", rate)
        for numbers in batches(rng, len(task.train.tokens), steps):
            self.step(*tensors(task.train.take(numbers)))
        return self.loss(task.held_out)

    def begin(self, weights: Weights) -> None:
        """Sets all parameters, those of the optimizer included, to ``weights``, or to their initial values."""
        from mindspore import Tensor, ops

        for name, parameter in self.parameters.items():
            value = weights.get(name, self.initial[name])
            ops.assign(parameter, Tensor(value, parameter.dtype))

    def drawn(self, rng: np.random.Generator) -> Weights:
        """Returns an initial A of each cell: uniform as LoRA has it."""
        from mindlora.nn.tree import lora_cells

        weights = {}
        for _, cell in lora_cells(self.network):
            a = cell.parts()["A"]
            bound = 1 / np.sqrt(a.shape[1])
            weights[a.name] = rng.uniform(-bound, bound, a.shape).astype(np.float32)
        return weights

    def loss(self, rows: Rows) -> float:
        """Returns the mean cross entropy of the labels that count."""
        self.held_out.set_train(False)
        total = count = 0.0
        for start in range(0, len(rows.tokens), HELD_OUT_BATCH):
            batch = rows.take(np.arange(start, min(start + HELD_OUT_BATCH, len(rows.tokens))))
            sums = self.held_out(*tensors(batch))
            total, count = total + float(sums[0].asnumpy()), count + float(sums[1].asnumpy())
        return total / count


def batches(rng: np.random.Generator, rows: int, steps: int) -> np.ndarray:
    """Returns the numbers of each step's rows: [steps, BATCH_SIZE], each row once in an epoch."""
    epochs = -(-steps * BATCH_SIZE // rows)
    order = np.concatenate([rng.permutation(rows) for _ in range(epochs)])
    return order[: steps * BATCH_SIZE].reshape(steps, BATCH_SIZE)


def tensors(rows: Rows) -> tuple:
    """Returns tokens and labels as tensors."""
    from mindspore import Tensor

    return Tensor(rows.tokens), Tensor(rows.labels)


def write_base(data: str, folder: str) -> str:
    """Writes the base as a folder from Hugging Face, and returns its path."""
    # Read where it is imported.
    os.environ["MINDLORA_TEST_DATA"] = data
    from pathlib import Path

    from tests.support import stories260k

    return str(stories260k.write_folder(Path(folder) / "stories260K"))


def build(base: str, length: int, lora: Optional[Dict[str, Any]]) -> Any:
    """Returns MindFormers' Llama with the base's weights, and with adapters that alone train if ``lora`` is given."""
    from mindformers.models import LlamaConfig, LlamaForCausalLM

    from mindlora import LoraConfig, apply_lora, freeze_base
    from mindlora.drafts.folder import read_folder
    from mindlora.drafts.model import CPU, model_nodes
    from mindlora.load_base import load_base
    from mindlora.plugin.graph.cpu_cells import use_cpu_cells
    from mindlora.plugin.graph.repeated_layers import compile_layers_once

    settings = model_nodes(read_folder(base), CPU, length)["model"]["model_config"]
    network = LlamaForCausalLM(LlamaConfig(**settings))
    load_base(network, base)
    if lora is not None:
        apply_lora(network, LoraConfig(**lora))
        freeze_base(network)
    use_cpu_cells(network)
    compile_layers_once(network)
    network.set_train(True)
    return network
