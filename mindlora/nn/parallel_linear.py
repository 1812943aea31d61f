"""Adapters on the linear cells of MindFormers' mcore models: ColumnParallelLinear, RowParallelLinear and their kin.

Such a cell returns (y, bias): with skip_bias_add, the bias is for the caller to add. Its product is a Morph, which
MindFormers shards by layouts and which runs in graph mode alone.
"""

import functools
from typing import Optional, Tuple, Type

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops import functional

from mindlora.config import LoraConfig
from mindlora.config.description import TIED_HEAD
from mindlora.config.variants.variant import CUT, SHARDED
from mindlora.errors import UnsupportedCellError
from mindlora.nn.cell import LoRACell, refuse_unsupported
from mindlora.nn.dense import LoRADense
from mindlora.nn.linear_form import is_sharded, parallel_layers, parallel_linear_types
from mindlora.nn.low_rank import LowRankPicks, Scale
from mindlora.nn.nf4 import NF4Dense
from mindlora.nn.qlora import QLoRADense
from mindlora.ops.backend import Choice


class ParallelLowRank(nn.Cell):
    """y + ((dropout(x) A^T) * scale) B^T in a sharded cell, by the products of MindFormers' own mcore LoRA.

    Beside a ColumnParallelLinear, A is whole and B is split by its rows; beside a RowParallelLinear, A is split by its
    columns, with a sum over the devices, and B is whole. x and y keep their axes [sequence, batch, ...], because the
    layouts name these.

    Args:
        cell (nn.Cell): The cell of the base.
        rank (int): Rank of the adapter.
        dropout_rate (float): Probability of dropping an element of x in training, by nn.Dropout.
    """

    def __init__(self, cell: nn.Cell, rank: int, dropout_rate: float):
        super().__init__()
        self.drops = dropout_rate > 0
        if self.drops:
            self.dropout = nn.Dropout(p=dropout_rate)
        self.a_product, self.b_product = (
            _product(kind, *sizes, cell)
            for kind, sizes in zip(_product_types(cell), ((cell.input_size, rank), (rank, cell.output_size)))
        )
        self.mul, self.sum, self.cast = ops.Mul(), ops.Add(), ops.Cast()
        if is_sharded(cell):
            self._shard(cell)

    def _shard(self, cell):
        layers = parallel_layers()
        layout, row = layers.layout, isinstance(cell, layers.RowParallelLinear)
        gathered = "cp_tp" if isinstance(cell, layers.SequenceParallelLinear) else "cp"
        scattered = "cp_tp" if row and cell.sequence_parallel else gathered
        out = "tp" if type(cell) is layers.ColumnParallelLinear else "None"
        if self.drops:
            self.dropout.dropout.shard((layout(gathered, "dp", "tp" if row else "None"),))
        self.mul.shard((layout(scattered, "dp", "None"), layout("None")))
        self.sum.shard((layout(scattered, "dp", out), layout(scattered, "dp", out)))

    def add_to(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Scale) -> Tensor:
        """y + ((dropout(x) A^T) * scale) B^T, for x [sequence, batch, in], A [r, in], B [out, r] and a number as scale.

        y [sequence, batch, out] is the base's product; all have its dtype, and so has the result, of its shape.
        """
        if self.drops and self.training:
            x = self.dropout(x)
        scale = self.cast(functional.tuple_to_array((scale,)), x.dtype)
        return self.sum(y, self.b_product(self.mul(self.a_product(x, a), scale), b))


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


class _Parallel(LoRACell):
    """What the adapters on mcore's linear cells have in common; it comes before the class of the plain adapter."""

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return parallel_linear_types()

    @classmethod
    def check(cls, cell: nn.Cell, config: Optional[LoraConfig]) -> None:
        check_parallel(cell)
        if config and is_sharded(cell):
            refuse_unsupported(config, SHARDED, *([CUT] if (cell.config.tensor_model_parallel_size or 1) > 1 else []))

    def construct(self, x: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Parameter]]:
        # The network passes a weight only to a cell without one of its own, which check refuses.
        out_shape, input_dtype = x.shape[:-1] + (self.out_channels,), x.dtype
        x = self.reshape(self.cast(x, self.dtype), (-1, self.in_channels))
        y = self._adapted(x)
        return self.cast(self.reshape(y, out_shape), input_dtype), self._returned_bias()

    def _returned_bias(self):
        return None if self.has_bias else self.bias


class LoRAParallelLinear(_Parallel, LoRADense):
    r"""A linear cell of an mcore model with a low-rank update: y = x W^T + bias + ((dropout(x) A^T) * scale) B^T.

    Weight, bias and the product x W^T are those of the cell that it replaces, with its sharding. In a sharded cell, the
    low-rank path is ParallelLowRank; else it is picked as in LoRADense. Only from_cell creates such a cell.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], mindpet_delta_lora_a [r, in_channels],
        mindpet_delta_lora_b [out_channels, r].

    Inputs:
        - **x** (Tensor) - Shape [sequence, batch, in_channels].

    Outputs:
        (y, bias): y of shape [sequence, batch, out_channels] and of the dtype of x; the bias if the caller is to add
        it (skip_bias_add), else None.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    def _adopt(self, cell, config):
        super()._adopt(cell, config)
        self.sharded = is_sharded(cell)
        self.morphed_forward, self.morphed_forward_with_bias = cell.morphed_forward, cell.morphed_forward_with_bias
        if self.sharded:
            reason = "the cell is sharded, and only MindSpore's own operators can be"
            low_rank = ParallelLowRank(cell, self.lora_rank, self.dropout_rate)
            low_rank.set_train(self.training)
            self.choice, self.low_rank, self.decode = LowRankPicks(
                Choice("lora_delta", "composed", reason), low_rank, None
            )

    def construct(self, x: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Parameter]]:
        if not self.sharded:
            return super().construct(x)
        input_dtype = x.dtype
        y = self._adapted(self.cast(x, self.dtype))
        return self.cast(y, input_dtype), self._returned_bias()

    def _base(self, x):
        weight = self.cast(self.weight, self.dtype)
        if self.has_bias:
            return self.morphed_forward_with_bias(x, weight, self._cast_bias())
        return self.morphed_forward(x, weight)


def on_parallel_linear(kind: Type[LoRADense]) -> Type[LoRADense]:
    """Returns the class that puts the adapter of ``kind`` on the linear cells of mcore models that are not sharded."""
    description = f"{kind.__name__} for the linear cells of mcore models that are not sharded."
    name = kind.__name__.replace("Dense", "ParallelLinear")
    return type(name, (_Parallel, kind), {"__doc__": description, "__module__": __name__})


class NF4ParallelLinear(NF4Dense):
    """NF4Dense for the linear cells of mcore models that are not sharded. It returns (y, bias), as they do."""

    @classmethod
    def check_plain(cls, cell: nn.Cell) -> None:
        check_parallel(cell)

    def construct(self, x: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Parameter]]:
        return super().construct(x), None if self.has_bias else self.bias


class QLoRAParallelLinear(_Parallel, QLoRADense):
    """QLoRADense for NF4ParallelLinear."""

    float_kind = LoRAParallelLinear

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return (NF4ParallelLinear,)

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        QLoRADense.check.__func__(cls, cell, config)


def check_parallel(cell: nn.Cell) -> None:
    """Raises UnsupportedCellError, with the reason, for a linear cell of an mcore model that carries no adapter."""
    kind = type(cell).__name__
    if isinstance(cell, LoRACell):
        raise UnsupportedCellError(
            f"{kind} has an adapter already: adapters do not stack. Use a network without adapters."
        )
    if not any(type(cell).construct is base.construct for base in parallel_linear_types()):
        raise UnsupportedCellError(
            f"{kind} has a forward of its own, which the adapter's cell would drop. Add it to exclude_modules."
        )
    if cell.weight is None:
        raise UnsupportedCellError(TIED_HEAD)
    if not cell.transpose_b:
        raise UnsupportedCellError(
            f"{kind} keeps its weight as [in_channels, out_channels] (transpose_b False), and the adapter needs "
            "[out_channels, in_channels]. Add it to exclude_modules."
        )
