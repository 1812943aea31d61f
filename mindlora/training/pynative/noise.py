"""NEFTune under the PyNative Trainer: a hook, as MindFormers looks for its embedding's weight and its sharding."""

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindlora.core.mindformers_version import require_mindformers

require_mindformers("2.0")
from mindformers.pynative.base_models.common.embeddings.vocab_embedding import VocabEmbedding  # noqa: E402


def add_embedding_noise(model: nn.Cell, alpha: float) -> None:
    """Adds the noise of NoisyEmbedding, which has the equation, to the output of a model's embedding, in training."""
    uniform = ops.UniformReal(ms.get_seed() or 0, 1)

    def noisy(cell: nn.Cell, inputs: Any, output: Tensor) -> Tensor:
        if not cell.training:
            return output
        bound = alpha / math.sqrt(inputs[0].shape[-1] * output.shape[-1])
        return output + ((2 * uniform(output.shape) - 1) * bound).astype(output.dtype)

    for _, cell in model.cells_and_names():
        if isinstance(cell, VocabEmbedding):
            cell.register_forward_hook(noisy)
