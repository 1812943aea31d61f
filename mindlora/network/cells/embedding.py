"""LoRAEmbedding: a frozen embedding table with a trainable low-rank path beside it; and NEFTune's noise."""

import functools
import math
import sys
from typing import Dict, List, Tuple

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Normal, initializer
from mindspore.ops import functional
from mindspore.ops.operations import Morph

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.pair_shapes import EMBEDDING
from mindlora.models.description import SHARDED_EMBEDDING
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.variant import SHARDED
from mindlora.network.cells.cell import (
    WEIGHTS,
    LoRACell,
    carry_settings,
    initial_value,
    refuse_own_forward,
    refuse_unsupported,
)
from mindlora.network.cells.linear_base import parallel_layers
from mindlora.network.cells.low_rank import Scale, TrainedRead
from mindlora.network.tree import replace_children, weight_of
from mindlora.ops.frozen_linear import FrozenGather


class LoRAEmbedding(LoRACell):
    """An embedding with a low-rank update: y = W[ids] + ((A^T)[ids] * scale) B^T.

    As in PEFT, A is initialized to zero and B to normal values, so that training starts from the base, and rows of
    tokens that never occur do not change. If lora_a_init or lora_b_init is given, both are as in LoRADense. As in PEFT,
    no dropout is applied. If an output head shares the table, only the embedding gets the update.

    Weights:
        weight [vocabulary, dim] under its own name, mindpet_delta_lora_a [r, vocabulary],
        mindpet_delta_lora_b [dim, r].

    Inputs:
        - **ids** (Tensor) - int32 or int64, of any shape.

    Outputs:
        Tensor of shape [*ids.shape, dim] and of the dtype of W, or float32 after hold_base.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    layout = EMBEDDING

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return embedding_types()

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        kind = type(cell).__name__
        refuse_own_forward(cell, embedding_types(), cls.__name__)
        if getattr(cell, "use_one_hot", False):
            raise UnsupportedCellError(
                f"{kind} multiplies one-hot vectors, which LoRAEmbedding does not. Set use_one_hot: False."
            )
        if getattr(cell.gather, "in_strategy", None) is not None:
            raise UnsupportedCellError(SHARDED_EMBEDDING)
        refuse_unsupported(config, cls.layout.cells)

    @classmethod
    def weight_shape(cls, cell: nn.Cell) -> Tuple[int, ...]:
        return weight_of(cell).shape

    def _adopt(self, cell, config):
        self.weight = weight_of(cell)
        # An output head that shares the table reads it under its own name.
        setattr(self, next(name for name in WEIGHTS if hasattr(cell, name)), self.weight)
        self.in_channels, self.out_channels = self.weight.shape
        self.dtype = getattr(mstype, config.compute_dtype) if config.compute_dtype else self.weight.dtype
        self.flattens = getattr(cell, "rmsnorm_compute_2d", False)
        # Of W and of A^T.
        self.rows, self.gather = ops.Gather(), ops.Gather()
        self.cast = ops.Cast()
        self.trained = TrainedRead(self.dtype)
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()
        self.lora_b_matmul = ops.MatMul(transpose_b=True)

    def hold_base(self) -> None:
        """Makes the cell widen the rows that it looks up in a frozen 16-bit table, and compute in float32."""
        self.rows, self.dtype, self.trained = FrozenGather(), mstype.float32, TrainedRead(mstype.float32)

    def _add_adapter(self, config, shared):
        dtype = getattr(mstype, config.param_init_type)
        shapes = self.part_shapes(self.base_cell, self.lora_rank)
        a_init = config.lora_a_init
        b_init = config.lora_b_init
        if a_init is None and b_init is None:
            a_init = "zeros"
            b_init = Normal(1.0)
        a = initial_value(a_init, list(shapes["A"]), dtype, "lora_a_init")
        b = initial_value(b_init, list(shapes["B"]), dtype, "lora_b_init")
        self._add_parts({"A": a, "B": b})

    def construct(self, ids: Tensor) -> Tensor:
        if self.flattens:
            ids = ids.reshape(-1)
        y = self.rows(self.weight, ids, 0)
        a = self.transpose(self.cast(self.mindpet_delta_lora_a, self.dtype), (1, 0))
        low_rank = self.gather(a, self.reshape(ids, (-1,)), 0) * self.cast(self.scale, self.dtype)
        update = self.lora_b_matmul(low_rank, self.trained.of(self.mindpet_delta_lora_b))
        return y + self.cast(self.reshape(update, y.shape), y.dtype)

    def extend_repr(self) -> str:
        return (
            f"vocabulary={self.in_channels}, dim={self.out_channels}, lora_rank={self.lora_rank}, "
            f"lora_alpha={self.lora_alpha}, compute_dtype={self.dtype}"
        )


def embedding_types() -> Tuple[type, ...]:
    """Returns the classes that LoRAEmbedding can replace: MindSpore's, and MindFormers' if that is imported."""
    layers = sys.modules.get("mindformers.models.llama.llama_layer")
    return (nn.Embedding, layers.LlamaEmbedding) if layers else (nn.Embedding,)


def parallel_embedding_types() -> Tuple[type, ...]:
    """Returns the class of embeddings of MindFormers' mcore models, if it is imported."""
    layers = parallel_layers()
    return (layers.VocabParallelEmbedding,) if layers else ()


def pynative_embedding_types() -> Tuple[type, ...]:
    """Returns the class of the embeddings of MindFormers' PyNative models, if it is imported."""
    module = sys.modules.get("mindformers.pynative.base_models.common.embeddings.vocab_embedding")
    return (module.VocabEmbedding,) if module else ()


class AroundEmbedding(nn.Cell):
    """A cell around an input embedding. It has no parameters; the embedding's keep their names.

    Args:
        embedding (nn.Cell): The embedding, with or without an adapter.
    """

    def __init__(self, embedding: nn.Cell):
        super().__init__(auto_prefix=False)
        self.embedding = embedding
        # The dtype of its rows: the embedding of mcore models declares the dtype of ids to a graph.
        self.dtype = embedding.dtype if isinstance(embedding, AroundEmbedding) else weight_of(embedding).dtype
        if hasattr(embedding, "weight"):
            # mcore models hand it to a tied output layer. Past nn.Cell, which would list it twice.
            self.__dict__["weight"] = embedding.weight
        carry_settings(embedding, self)


def only_embedding(network: nn.Cell, field: str, purpose: str) -> nn.Cell:
    """Returns the one input embedding of a network, with or without an adapter.

    Raises UnsupportedCellError, which says what ``field`` of LoraConfig does at the embedding, unless there is exactly
    one.
    """
    kinds = (LoRAEmbedding, *embedding_types(), *parallel_embedding_types(), *pynative_embedding_types())
    embeddings: Dict[str, nn.Cell] = {
        path: cell
        for path, cell in network.cells_and_names()
        if isinstance(cell, kinds) and weight_of(cell) is not None
    }
    if len(embeddings) != 1:
        raise UnsupportedCellError(
            f"{field} {purpose} the one embedding of a network, but {type(network).__name__} has {len(embeddings)}: "
            f"{', '.join(embeddings) or 'none'}. Remove {field}."
        )
    return next(iter(embeddings.values()))


class NoisyEmbedding(AroundEmbedding):
    r"""y = embedding(ids) + u * alpha / sqrt(L * dim) in training, u uniform in (-1, 1); y = embedding(ids) otherwise.

    The noise is new at each call, in a sequence that mindspore.set_seed fixes and that restarts in each process.

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
        # With two zeros, MindSpore picks a random seed. A recomputed forward adds the same noise.
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
