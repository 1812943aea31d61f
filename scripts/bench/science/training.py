"""Many short trainings of stories260K: a train step is compiled once, whatever the rate, the seed and the weights."""

import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import numpy as np

from bench.science.data import IGNORED, PAD, Rows, Task

BATCH_SIZE, HELD_OUT_BATCH = 4, 32
# As a YAML of this project has it.
MAX_GRADIENT_NORM = 1.0
Weights = Dict[str, np.ndarray]


class Curve(NamedTuple):
    """The held-out loss of a training, in nats per token, after so many steps."""

    steps: List[int]
    losses: List[float]

    @property
    def last(self) -> float:
        """The loss after the last step."""
        return self.losses[-1]


class Trainings:
    """Trainings of one base with one adapter, or in full if there is none.

    Each begins with the base's weights and the adapter's initial ones, and takes its rows in an order that its seed
    draws. B learns at ``ratio`` times the rate of A.
    """

    def __init__(self, base: str, length: int, lora: Optional[Dict[str, Any]] = None, ratio: float = 1):
        import mindspore as ms
        from mindspore import nn

        from mindlora import lora_plus_groups
        from mindlora.plugin.callbacks.held_out_loss import HeldOutLossCell
        from mindlora.plugin.graph.train_step import LoraTrainOneStepCell

        ms.set_seed(0)
        self.network = build(base, length, lora)
        trained = self.network.trainable_params() if ratio == 1 else lora_plus_groups(self.network, 1.0, ratio)
        self.step = LoraTrainOneStepCell(
            self.network, nn.Adam(trained, 1.0), use_clip_grad=True, max_grad_norm=MAX_GRADIENT_NORM, scale_sense=1.0
        )
        self.held_out = HeldOutLossCell(self.network, IGNORED)
        self.parameters = {p.name: p for p in self.step.get_parameters()}
        self.initial = {name: p.asnumpy().copy() for name, p in self.parameters.items()}

    @property
    def base_weights(self) -> List[str]:
        """The names of the weights under the adapters."""
        from mindlora.nn.tree import lora_cells

        return [cell.weight.name for _, cell in lora_cells(self.network)]

    @property
    def trained(self) -> int:
        """How many numbers train."""
        return sum(p.size for p in self.network.trainable_params())

    def train(
        self,
        task: Task,
        rate: float,
        seed: int,
        steps: int,
        every: Optional[int] = None,
        weights: Optional[Weights] = None,
    ) -> Curve:
        """Trains once, and measures the held-out loss after the last step; with ``every``, also at 0, every, ... steps.

        ``weights`` replaces some of the initial values.
        """
        curve = Curve([], [])
        for done in self.states(task.train, rate, seed, steps, weights):
            if done == steps or (every and done % every == 0):
                curve.steps.append(done)
                curve.losses.append(self.loss(task.held_out))
        return curve

    def states(
        self, rows: Rows, rate: float, seed: int, steps: int, weights: Optional[Weights] = None
    ) -> Iterator[int]:
        """Trains once, and yields before the first step and after each how many are done: what is there to measure."""
        rng = np.random.default_rng(seed)
        self.begin({**self.drawn(rng), **(weights or {})})
        self.step.set_rate_factor("science", rate)
        yield 0
        for done, numbers in enumerate(batches(rng, len(rows.tokens), steps), 1):
            self.step(*tensors(rows.take(numbers)))
            yield done

    def begin(self, weights: Weights) -> None:
        """Sets all parameters, those of the optimizer included, to ``weights``, or to their initial values."""
        from mindspore import Tensor, ops

        for name, parameter in self.parameters.items():
            value = weights.get(name, self.initial[name])
            ops.assign(parameter, Tensor(value, parameter.dtype))

    def drawn(self, rng: np.random.Generator) -> Weights:
        """Returns an initial A of each cell that draws it: uniform as LoRA has it."""
        from mindlora.nn.tree import lora_cells

        weights = {}
        for _, cell in lora_cells(self.network):
            # PiSSA computes its A.
            if cell.initial_pair is None:
                a = cell.parts()["A"]
                bound = 1 / np.sqrt(a.shape[1])
                weights[a.name] = rng.uniform(-bound, bound, a.shape).astype(np.float32)
        return weights

    def own_texts(self, count: int, length: int) -> Rows:
        """Returns texts that the base says itself, drawn at temperature 1."""
        from mindlora.plugin.callbacks.sample_answers import continuations

        rng = np.random.default_rng(0)
        self.begin({})
        self.network.set_train(False)
        config = self.network.config
        texts = continuations(
            self.network,
            [[config.bos_token_id]] * count,
            config.seq_length,
            PAD,
            config.eos_token_id,
            length,
            lambda logits: (logits + rng.gumbel(size=logits.shape)).argmax(-1),
        )
        self.network.set_train(True)
        tokens = np.full((count, config.seq_length + 1), PAD, np.int32)
        labels = np.full_like(tokens, IGNORED)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            labels[row, 1 : len(text)] = text[1:]
        return Rows(tokens, labels)

    def loss(self, rows: Rows) -> float:
        """Returns the mean cross entropy of the labels that count."""
        self.held_out.set_train(False)
        total = count = 0.0
        for start in range(0, len(rows.tokens), HELD_OUT_BATCH):
            batch = rows.take(np.arange(start, min(start + HELD_OUT_BATCH, len(rows.tokens))))
            sums = self.held_out(*tensors(batch))
            total, count = total + float(sums[0].asnumpy()), count + float(sums[1].asnumpy())
        self.network.set_train(True)
        return total / count


def batches(rng: np.random.Generator, rows: int, steps: int) -> np.ndarray:
    """Returns the numbers of each step's rows: [steps, BATCH_SIZE], each row once in an epoch."""
    epochs = 1 + steps * BATCH_SIZE // rows
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

    from mindlora import LoraConfig, apply_lora, freeze_base, initialize_adapters
    from mindlora.drafts.folder import read_folder
    from mindlora.drafts.model import CPU, model_nodes
    from mindlora.load_base import load_base
    from mindlora.nn.repeated_layers import compile_layers_once
    from mindlora.plugin.graph.cpu_cells import use_cpu_cells

    settings = model_nodes(read_folder(base), CPU, length)["model"]["model_config"]
    network = LlamaForCausalLM(LlamaConfig(**settings))
    load_base(network, base)
    if lora is not None:
        apply_lora(network, LoraConfig(**lora))
        freeze_base(network)
    use_cpu_cells(network)
    compile_layers_once(network)
    if lora is not None:
        initialize_adapters(network)
    network.set_train(True)
    return network
