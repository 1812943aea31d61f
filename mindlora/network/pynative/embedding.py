"""LoRAPyNativeEmbedding: LoRA on the embedding of the models that MindFormers' PyNative Trainer runs."""

from typing import Optional, Tuple

from mindspore import Parameter, Tensor, mint, nn, ops

from mindlora.core.errors import UnsupportedCellError
from mindlora.models.description import SHARDED_EMBEDDING
from mindlora.models.lora_config import LoraConfig
from mindlora.network.cells.cell import InitialDraws, refuse_own_forward, refuse_unsupported
from mindlora.network.cells.embedding import LoRAEmbedding, pynative_embedding_types
from mindlora.network.pynative.linear import AllocatedLater, is_divided, local, names_of, on_linear

# What MindFormers' VocabEmbedding keeps besides its weight.
_OF_EMBEDDING = ("num_embeddings", "embedding_dim", "index_select", "init_method")


class LoRAPyNativeEmbedding(AllocatedLater, LoRAEmbedding):
    """The embedding of a PyNative model with a low-rank update: y = W[ids] + ((A^T)[ids] * scale) B^T.

    A tied output head gets the table without the update. The cell is an instance of MindFormers' VocabEmbedding too.
    Only from_cell creates it.

    Weights:
        weight [vocabulary, dim], lora_a [r, vocabulary], lora_b [dim, r].

    Inputs:
        - **ids** (Tensor) - int32 or int64 [batch, N].

    Outputs:
        Tensor of shape [batch, N, dim] and of the dtype of W.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    parameter_names = names_of("A", "B")
    # MindFormers' VocabEmbedding, and the class that on_linear has joined with it.
    linear_type: type
    # Shared by the cells of a model with pet_config.seed.
    draws = InitialDraws(None)
    lora_a: Parameter
    lora_b: Parameter

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return pynative_embedding_types()

    @classmethod
    def from_cell(
        cls, cell: nn.Cell, config: LoraConfig, shared: Optional[Tuple[Parameter, ...]] = None
    ) -> "LoRAPyNativeEmbedding":
        cls.check(cell, config)
        return super(LoRAPyNativeEmbedding, on_linear(cls, *pynative_embedding_types())).from_cell(cell, config, shared)

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        refuse_own_forward(cell, pynative_embedding_types(), cls.__name__)
        refuse_unsupported(config, cls.layout.cells)

    def _adopt(self, cell, config):
        super()._adopt(cell, config)
        for name in _OF_EMBEDDING:
            setattr(self, name, getattr(cell, name))
        self.config = config

    def _add_adapter(self, config, shared):
        if self.weight.is_meta:
            self._add_unallocated_parts(config)
        else:
            super()._add_adapter(config, shared)

    def reset_parameter(self) -> None:
        """Sets all parameters that MindFormers has allocated to their initial values."""
        if is_divided(self.weight):
            raise UnsupportedCellError(SHARDED_EMBEDDING)
        self.linear_type.reset_parameter(self)
        with self.draws:
            super()._add_adapter(self.config, ())

    def construct(self, ids: Tensor) -> Tensor:
        y = self.without_adapter(ids)
        a, b = (self.cast(local(parameter), self.dtype) for parameter in (self.lora_a, self.lora_b))
        low_rank = ops.gather(mint.transpose(a, 1, 0), self.reshape(ids, (-1,)), 0) * self.scale
        update = mint.matmul(low_rank, mint.transpose(b, 1, 0))
        return y + self.cast(self.reshape(update, y.shape), y.dtype)

    def without_adapter(self, ids: Tensor) -> Tensor:
        """Returns the output of the replaced cell."""
        return self.linear_type.construct(self, ids)
