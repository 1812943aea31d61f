"""Adapters on the embedding of MindFormers' mcore models, VocabParallelEmbedding, whole or sharded."""

import functools
from typing import List, Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.ops import functional
from mindspore.ops.operations import Morph

from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.variant import SHARDED
from mindlora.network.cells.cell import refuse_own_forward, refuse_unsupported
from mindlora.network.cells.embedding import LoRAEmbedding, parallel_embedding_types
from mindlora.network.cells.linear_base import parallel_layers
from mindlora.network.cells.low_rank import Scale


class LoRAParallelEmbedding(LoRAEmbedding):
    """The embedding of an mcore model with a low-rank update: y = W[ids] + ((A^T)[ids] * scale) B^T.

    It is initialized as LoRAEmbedding is. Other readers of the table, a tied output layer or multi-token prediction,
    get it without the update. Where the table is split by rows, A is split by columns, and B is whole. Only
    from_cell creates such a cell.

    Weights:
        weight [vocabulary, dim], mindpet_delta_lora_a [r, vocabulary], mindpet_delta_lora_b [dim, r].

    Inputs:
        - **ids** (Tensor) - int32 or int64 [batch, N].

    Outputs:
        Tensor of shape [batch, N, dim] and of the dtype of W.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return parallel_embedding_types()

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        refuse_own_forward(cell, parallel_embedding_types(), cls.__name__)
        refuse_unsupported(config, cls.layout.cells, *((SHARDED,) if _is_sharded(cell) else ()))

    def _adopt(self, cell, config):
        super()._adopt(cell, config)
        self.sharded = ShardedLookup(cell, self.lora_rank, self.dtype) if _is_sharded(cell) else None

    def construct(self, ids: Tensor) -> Tensor:
        if self.sharded is None:
            return self.looked_up(ids)
        return self.sharded.of(ids, self.weight, self.mindpet_delta_lora_a, self.mindpet_delta_lora_b, self.scale)

    # super() in a graph refers to the cell's own class, whichever class defines the method.
    looked_up = LoRAEmbedding.construct


class ShardedLookup(nn.Cell):
    """W[ids] + ((A^T)[ids] * scale) B^T where MindFormers has told the embedding how it is sharded.

    Rows of A^T are looked up like those of W, by MindFormers' own function: each device has the rows of its tokens, and
    a sum over the devices brings them together. It holds no parameters.
    """

    def __init__(self, cell: nn.Cell, rank: int, dtype: mstype.Type):
        super().__init__()
        layers = parallel_layers()
        rows = type(cell)(cell.num_embeddings, rank, functools.partial(initializer, "zeros"), cell.config)
        del rows.weight
        self.dtype = dtype
        self.transpose, self.mul, self.sum, self.cast = ops.Transpose(), ops.Mul(), ops.Add(), ops.Cast()
        self.matmul = ops.MatMul(transpose_b=True)
        layout, split = layers.layout, "tp" if cell.enable_embedding_tp else "None"
        ids, table = layout("dp", "cp"), layout(split, "None")
        out = layout("dp", "cp_tp" if cell.sequence_parallel else "cp", "None")
        # Not embedding_morph, which declares rows of the dtype of ids.
        self.rows = _morph(cell.embedding_func, _shape_of_rows, (ids, table), out)
        self.rows_of_a = _morph(rows.embedding_func, _shape_of_rows, (ids, table), out)
        self.product = _morph(self._product, _shape_of_product, (out, layout("None", "None")), out)
        self.transpose.shard((layout("None", split),))
        self.mul.shard((out, layout("None")))
        self.sum.shard((out, out))

    def of(self, ids: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """W[ids] + ((A^T)[ids] * scale) B^T, [batch, N, dim], for ids [batch, N]."""
        y = self.rows(ids, weight)
        low_rank = self.rows_of_a(ids, self.transpose(self.cast(a, self.dtype), (1, 0)))
        scale = self.cast(functional.tuple_to_array((scale,)), self.dtype)
        update = self.product(self.mul(low_rank, scale), self.cast(b, self.dtype))
        return self.sum(y, self.cast(update, y.dtype))

    def _product(self, x, b):
        # On a device's own part: a Morph is divided as a whole.
        return self.matmul(x.reshape((-1, x.shape[-1])), b).reshape(x.shape[:-1] + (b.shape[0],))


def _is_sharded(cell) -> bool:
    return getattr(cell.embedding_morph, "in_layout", None) is not None


def _morph(function, shape_of, in_layouts, out_layout):
    morph = Morph(function, shape_of, _dtype_of_second).add_prim_attr("self_define_shard", True)
    morph.shard(in_strategy=in_layouts, out_strategy=(out_layout,))
    return morph


def _shape_of_rows(ids: List[int], table: List[int]) -> List[int]:
    return [*ids, table[1]]


def _shape_of_product(x: List[int], b: List[int]) -> List[int]:
    return [*x[:-1], b[0]]


def _dtype_of_second(_: mstype.Type, second: mstype.Type) -> mstype.Type:
    return second
