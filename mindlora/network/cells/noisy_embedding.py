"""NEFTune: noise on the output of the input embedding, in training alone."""

import math

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindlora.network.cells.embedding import AroundEmbedding, only_embedding
from mindlora.network.tree import replace_children


class NoisyEmbedding(AroundEmbedding):
    r"""y = embedding(ids) + u * alpha / sqrt(L * dim) in training, u uniform in (-1, 1); y = embedding(ids) otherwise.

    The noise is new at each call, in a sequence that mindspore.set_seed fixes and that starts again in each process.

    Args:
        embedding (nn.Cell): The embedding, with or without an adapter.
        alpha (float): Strength of the noise, above 0; the paper tries 5, 10 and 15.

    Inputs:
        - **ids** (Tensor) - int32 or int64, shape [..., L], L tokens in a row, padding included.

    Outputs:
        Tensor, shape and dtype of the embedding's output.

    Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, 2023.
    """

    def __init__(self, embedding: nn.Cell, alpha: float):
        super().__init__(embedding)
        self.alpha = float(alpha)
        # With two zeros, MindSpore picks a seed that differs from run to run. A recomputed forward adds the same noise.
        self.uniform = ops.UniformReal(ms.get_seed() or 0, 1).recompute(False)
        self.cast = ops.Cast()

    def construct(self, ids: Tensor) -> Tensor:
        y = self.embedding(ids)
        if not self.training:
            return y
        bound = self.alpha / math.sqrt(ids.shape[-1] * y.shape[-1])
        noise = (2 * self.uniform(y.shape) - 1) * bound
        return self.cast(y, self.dtype) + self.cast(noise, self.dtype)


def add_embedding_noise(network: nn.Cell, alpha: float) -> None:
    """Puts NoisyEmbedding around the embedding of ``network``, which must have exactly one."""
    cell = only_embedding(network, "neftune_alpha", "adds noise to")
    replace_children(network, {id(cell): NoisyEmbedding(cell, alpha)})
