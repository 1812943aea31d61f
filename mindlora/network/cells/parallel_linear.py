"""Adapters on the linear cells of MindFormers' mcore models: ColumnParallelLinear, RowParallelLinear and their kin.

Such a cell returns (y, bias): with skip_bias_add, the caller adds the bias. Its product is a Morph, which
MindFormers shards by layouts and which runs in graph mode alone.
"""

import functools
import math
from typing import Any, Optional, Tuple, Type

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.ops import functional

from mindlora.core.errors import UnsupportedCellError
from mindlora.models.variants.variant import CUT, SHARDED
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.linear_base import (
    LinearBase,
    check_mindformers_linear,
    is_sharded,
    parallel_layers,
    parallel_linear_types,
)
from mindlora.network.cells.low_rank import LowRankPicks, Scale
from mindlora.network.quantized.nf4 import NF4Dense, QLoRADense
from mindlora.network.quantized.quantized_dense import IntegerDense, QuantizedBase
from mindlora.ops.backend import Choice


class ParallelLowRank(nn.Cell):
    """y + ((dropout(x) A^T) * scale) B^T in a sharded cell, by the products of MindFormers' own mcore LoRA.

    Beside a ColumnParallelLinear, A is whole and B is split by its rows; beside a RowParallelLinear, A is split by its
    columns, with a sum over the devices, and B is whole. x and y keep their axes [sequence, batch, ...], since the
    layouts name these.
    """

    def __init__(self, cell: nn.Cell, rank: int, dropout_rate: float):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout_rate) if dropout_rate > 0 else None
        a_type, b_type = _product_types(cell)
        self.a_product = _product(a_type, cell.input_size, rank, cell)
        self.b_product = _product(b_type, rank, cell.output_size, cell)
        self.mul = ops.Mul()
        self.sum = ops.Add()
        self.cast = ops.Cast()
        if is_sharded(cell):
            self._shard(cell)

    def _shard(self, cell):
        layers = parallel_layers()
        layout = layers.layout
        row = isinstance(cell, layers.RowParallelLinear)
        gathered = "cp_tp" if isinstance(cell, layers.SequenceParallelLinear) else "cp"
        scattered = "cp_tp" if row and cell.sequence_parallel else gathered
        out = "tp" if type(cell) is layers.ColumnParallelLinear else "None"
        if self.dropout is not None:
            # By numbers: MindSpore's Dropout, which also returns its mask, takes no Layout.
            axes = (gathered, "dp", "tp" if row else "None")
            self.dropout.dropout.shard((tuple(_parts(cell.config, axis) for axis in axes),))
        self.mul.shard((layout(scattered, "dp", "None"), layout("None")))
        self.sum.shard((layout(scattered, "dp", out), layout(scattered, "dp", out)))

    def add_to(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """y + ((dropout(x) A^T) * scale) B^T, for x [sequence, batch, in] and y [sequence, batch, out] of one dtype."""
        if self.dropout is not None and self.training:
            x = self.dropout(x)
        scale = self.cast(functional.tuple_to_array((scale,)), x.dtype)
        return self.sum(y, self.b_product(self.mul(self.a_product(x, a), scale), b))


def _parts(config: Any, axis: str) -> int:
    """Returns the number of parts into which an axis of a Layout, such as "cp_tp", divides an axis of a tensor."""
    sizes = {
        "cp": config.context_parallel_size,
        "dp": config.data_parallel_size,
        "tp": config.tensor_model_parallel_size,
        "None": 1,
    }
    return math.prod(sizes[name] or 1 for name in axis.split("_"))


def _product_types(cell) -> Tuple[type, type]:
    """Returns the classes of the cells that multiply by A and by B as ``cell`` is sharded."""
    layers = parallel_layers()
    if isinstance(cell, layers.RowParallelLinear):
        whole = layers.SequenceParallelLinear if cell.sequence_parallel else layers.LinearNoTP
        return layers.RowParallelLinear, whole
    kind = type(cell)
    return (layers.LinearNoTP if kind is layers.ColumnParallelLinear else kind), kind


def _product(kind, in_channels, out_channels, cell):
    """Returns the Morph x W^T of a cell that MindFormers shards; its weight is dropped."""
    linear = kind(
        in_channels,
        out_channels,
        config=cell.config,
        init_method=functools.partial(initializer, "zeros"),
        bias=False,
        skip_bias_add=True,
    )
    del linear.weight
    linear.compute_dtype = cell.compute_dtype
    return linear.morphed_forward


class ParallelBase(LinearBase):
    """The base of the linear cells of mcore models, which compute like other linear cells unless they are sharded."""

    types = staticmethod(parallel_linear_types)

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        check_mindformers_linear(cell, parallel_linear_types())
        if not cell.transpose_b:
            raise UnsupportedCellError(
                f"{type(cell).__name__} keeps its weight as [in_channels, out_channels] (transpose_b False), but the "
                "adapter needs [out_channels, in_channels]. Add it to exclude_modules."
            )

    @classmethod
    def traits(cls, cell: nn.Cell) -> Tuple[str, ...]:
        if not is_sharded(cell):
            return ()
        return (SHARDED, CUT) if (cell.config.tensor_model_parallel_size or 1) > 1 else (SHARDED,)

    @staticmethod
    def operators(cell: nn.Cell) -> Tuple[Any, Any, mstype.Type]:
        # With skip_bias_add, the cell returns its bias beside y, for the caller to add.
        return cell.matmul, cell.add if cell.has_bias and not cell.skip_bias_add else None, cell.compute_dtype

    @classmethod
    def of(cls, cell: nn.Cell, compute_dtype: Optional[str] = None) -> LinearBase:
        return (ShardedBase if is_sharded(cell) else cls)(cell, compute_dtype)


class ShardedBase(ParallelBase):
    """The base of a sharded linear cell of an mcore model: the Morphs of MindFormers, which keep the axes of x."""

    def __init__(self, cell: nn.Cell, compute_dtype: Optional[str]):
        super().__init__(cell, compute_dtype)
        self._adopted = (cell,)
        self.morphed_forward = cell.morphed_forward
        self.morphed_forward_with_bias = cell.morphed_forward_with_bias

    def pick_low_rank(self, rank: int, dropout_rate: float) -> LowRankPicks:
        reason = "the cell is sharded, and only MindSpore's own operators can be"
        low_rank = ParallelLowRank(self._adopted[0], rank, dropout_rate)
        return LowRankPicks(Choice("lora_delta", "composed", reason), low_rank, None)

    def tokens(self, x: Tensor) -> Tensor:
        return self.cast(x, self.dtype)

    def linear(self, x: Tensor, weight: Tuple[Tensor, ...], bias: Optional[Parameter]) -> Tensor:
        if self.has_bias:
            return self.morphed_forward_with_bias(x, weight[0], self.cast(bias, self.dtype))
        return self.morphed_forward(x, weight[0])

    def like(self, y: Tensor, x: Tensor) -> Tensor:
        return self.cast(y, x.dtype)


def construct_parallel(self: nn.Cell, x: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
    """The construct of cells that replace mcore's: the result of ``computed``, and the bias that is not added."""
    # The weight passed to a tied output layer is its own (mindlora.network.tree).
    return self.computed(x), None if self.has_bias else self.bias


def on_parallel_linear(kind: Type[nn.Cell], base_kind: Type[LinearBase] = ParallelBase) -> Type[nn.Cell]:
    """Returns the subclass of ``kind`` for the linear cells of mcore models.

    Its inputs and outputs are those of LoRAParallelLinear.
    """
    name = kind.__name__.replace("Dense", "ParallelLinear")
    document = f"{kind.__name__} for the linear cells of mcore models."
    members = {"__doc__": document, "__module__": __name__, "base_kind": base_kind}
    return type(name, (kind,), {**members, "construct": construct_parallel, "computed": kind.construct})


class LoRAParallelLinear(LoRADense):
    r"""A linear cell of an mcore model with a low-rank update: y = x W^T + bias + ((dropout(x) A^T) * scale) B^T.

    Weight, bias and the product x W^T come from the replaced cell, with its sharding. In a sharded cell, the
    low-rank path is ParallelLowRank; otherwise it is picked as in LoRADense. Only from_cell creates such a cell.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], mindpet_delta_lora_a [r, in_channels],
        mindpet_delta_lora_b [out_channels, r].

    Inputs:
        - **x** (Tensor) - Shape [sequence, batch, in_channels].
        - **weight** (Tensor) - The embedding's table, passed to a tied output layer. Default: None.

    Outputs:
        (y, bias): y of shape [sequence, batch, out_channels] and of the dtype of x; the bias if the caller adds
        it (skip_bias_add), otherwise None.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    base_kind = ParallelBase
    # super() in a graph refers to the cell's own class, whichever class defines the method.
    computed = LoRADense.construct

    def _adopt(self, cell, config):
        super()._adopt(cell, config)
        # MindSpore sends a table to the pipeline stage of the output layer only if the layer takes it as an argument.
        self.takes_table = is_sharded(cell) and getattr(cell, "skip_weight_param_allocation", False)

    def construct(self, x: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Parameter]]:
        y = self._with_table(x, weight) if self.takes_table else self.computed(x)
        return y, None if self.has_bias else self.bias

    def _with_table(self, x, table):
        tokens = self.base.tokens(x)
        a, b = self.trained.of(self.mindpet_delta_lora_a), self.trained.of(self.mindpet_delta_lora_b)
        y = self.base.linear(tokens, (self.cast(table, self.dtype),), self.bias)
        return self.base.like(self.low_rank.add_to(y, tokens, a, b, self.scale), x)


NF4ParallelLinear = on_parallel_linear(NF4Dense)
IntegerParallelLinear = on_parallel_linear(IntegerDense)


class QuantizedParallelBase(QuantizedBase):
    """The base of sharded and undivided quantized cells of mcore models."""

    @staticmethod
    def types() -> Tuple[type, ...]:
        return NF4ParallelLinear, IntegerParallelLinear


QLoRAParallelLinear = on_parallel_linear(QLoRADense, QuantizedParallelBase)
