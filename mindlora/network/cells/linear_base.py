"""The base of a linear cell with an adapter: the cells that it supports, and y = activation(x W^T + bias).

There is one class per kind of base. An instance holds operators and no parameters: weight and bias come from the
cell, which calls its methods, not construct (see mindlora.network.cells.low_rank).
"""

import itertools
import sys
from types import ModuleType
from typing import Any, Optional, Tuple

import mindspore
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.folding import Rows
from mindlora.core.yaml_file import SHARDING_MODES
from mindlora.models.description import expert_refusal
from mindlora.models.variants.variant import CUT, SHARDED
from mindlora.network.cells.cell import LoRACell, refuse_own_forward
from mindlora.network.cells.low_rank import LowRankPicks, pick_low_rank
from mindlora.network.tensors import to_array
from mindlora.ops.frozen_linear import FrozenLinear

_PYNATIVE_LINEAR = "mindformers.pynative.layers.linear"
_PARALLEL_LAYERS = "mindformers.parallel_core.training_graph.tensor_parallel.layers"
# Attributes of linear cells' sizes, by kind.
_CHANNELS = (("in_channels", "out_channels"), ("input_size", "output_size"), ("in_features", "out_features"))


class LinearBase(nn.Cell):
    """The base of nn.Dense, mint.nn.Linear and MindFormers' Linear; a class for other cells overrides what differs.

    Args:
        cell (nn.Cell): The cell that gets an adapter.
        compute_dtype (str): The dtype of the products. Default: None, the cell's.
        matmul (Cell): The operator of x W^T. Default: None, the cell's.

    Attributes:
        holds (bool): Whether the product takes a 16-bit W directly; see ``hold``.
    """

    def __init__(self, cell: nn.Cell, compute_dtype: Optional[str] = None, matmul: Optional[nn.Cell] = None):
        super().__init__()
        self.in_channels, self.out_channels = channels_of(cell)
        operator, self.bias_add, dtype = self.operators(cell)
        self.matmul = operator if matmul is None else matmul
        self.dtype = getattr(mstype, compute_dtype) if compute_dtype else dtype
        self.has_bias = self.bias_add is not None
        self.holds = False
        self.cast = ops.Cast()
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()
        self.times_transposed = ops.MatMul(transpose_b=True)
        self.mul = ops.Mul()
        self.row_sum = ops.ReduceSum()
        self.stop_gradient = ops.StopGradient()

    def hold(self, rounds: bool) -> None:
        """Makes the product take a frozen 16-bit W directly; ``rounds`` is as in FrozenLinear, which computes it.

        The product's input and output are float32. For a CPU.
        """
        self.matmul, self.exact, self.holds = FrozenLinear(rounds), FrozenLinear(), True

    @classmethod
    def of(cls, cell: nn.Cell, compute_dtype: Optional[str] = None) -> "LinearBase":
        """Returns the base of a cell: this class, or one for a form of the cell."""
        return cls(cell, compute_dtype)

    @staticmethod
    def types() -> Tuple[type, ...]:
        """Returns the classes of the cells."""
        return plain_linear_types()

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        """Raises UnsupportedCellError, with the reason, for a cell that can carry no adapter nor be quantized."""
        kind = type(cell).__name__
        if isinstance(cell, LoRACell):
            raise UnsupportedCellError(
                "The cell is a LoRADense already: adapters do not stack. Use a network without adapters."
            )
        if not isinstance(cell, plain_linear_types()):
            raise UnsupportedCellError(
                f"{kind} is none of nn.Dense, mint.nn.Linear and MindFormers' Linear: pass one of these."
            )
        refuse_own_forward(cell, plain_linear_types(), "LoRADense")
        if getattr(cell, "expert_num", 1) > 1 or getattr(cell, "use_gmm", False):
            raise UnsupportedCellError(expert_refusal(kind, cell.expert_num))
        if not getattr(cell, "transpose_b", True):
            raise UnsupportedCellError(
                f"{kind} keeps its weight as [in_channels, out_channels] (transpose_b False); "
                "LoRADense needs [out_channels, in_channels]. Add it to exclude_modules."
            )
        if isinstance(cell, mint.nn.Linear) and is_sharded(cell):
            raise UnsupportedCellError(
                f"{kind} of mindspore.mint is sharded, but LoRA's strategies are derived from those of nn.Dense "
                "and MindFormers' Linear alone. Add it to exclude_modules."
            )
        if getattr(cls.operators(cell)[0], "in_layout", None) is not None:
            raise UnsupportedCellError(
                f"{kind} is sharded by Layouts, from which LoRA's strategies cannot be derived. "
                "Switch n-dimensional tensor parallelism off (use_3d_tensor_parallel: False)."
            )

    @classmethod
    def traits(cls, cell: nn.Cell) -> Tuple[str, ...]:
        """Returns traits of the cell that variants may not support: SHARDED, QUANTIZED, ... (see Variant.refusal)."""
        strategy = strategy_of(cls.operators(cell)[0])
        if not strategy:
            return ()
        return (SHARDED, CUT) if max(strategy[1]) > 1 else (SHARDED,)

    @staticmethod
    def operators(cell: nn.Cell) -> Tuple[Any, Any, mstype.Type]:
        """Returns the operators of x W^T and of the bias, which is None if the cell adds none, and their dtype."""
        if isinstance(cell, mint.nn.Linear):
            return cell.dense, ops.Add() if cell.has_bias else None, cell.weight.dtype
        # nn.Dense computes in the dtype of its weight; MindFormers' Linear has its own dtype.
        return cell.matmul, cell.bias_add if cell.has_bias else None, getattr(cell, "dtype", cell.weight.dtype)

    def pick_low_rank(self, rank: int, dropout_rate: float) -> LowRankPicks:
        """Picks the operators of plain LoRA's path."""
        channels = (self.in_channels, self.out_channels)
        return pick_low_rank(rank, self.dtype, dropout_rate, self.has_bias, strategy_of(self.matmul), channels)

    def tokens(self, x: Tensor) -> Tensor:
        """x as the products take it: [tokens, in_channels], in their dtype."""
        return self.reshape(self.cast(x, self.dtype), (-1, self.in_channels))

    def operand(self, weight: Parameter) -> Tensor:
        """W as the product takes it: in the dtype of the products, or in the held bits."""
        return weight if self.holds else self.cast(weight, self.dtype)

    def product(self, x: Tensor, weight: Tuple[Tensor, ...]) -> Tensor:
        """x W^T; ``weight`` is (W,), as ``operand`` returns it, or the tensors of a quantized W."""
        # Not *weight: unpacked values have no scope in a graph, and a recomputed layer would not compute them again.
        if len(weight) == 1:
            return self.matmul(x, weight[0])
        if len(weight) == 3:
            codes, zeros, scales = weight
            return self.matmul(x, codes, zeros, scales)
        codes, absmax, scales, offsets = weight
        return self.matmul(x, codes, absmax, scales, offsets)

    def times_rows(self, weight: Tuple[Tensor, ...], a: Tensor) -> Tensor:
        """W A^T, [out, r], for a matrix A [r, in] of the products' dtype; without a gradient for W.

        ``weight`` is as in ``product``. Where W is held in 16 bits, nothing is rounded to them.
        """
        if self.holds:
            return self.transpose(self.exact(a, weight[0]), (1, 0))
        return self.times_transposed(self.stop_gradient(weight[0]), a)

    def squared_norms(self, stored: Tuple[Tensor, ...], after: Tensor) -> Tensor:
        """||W||^2 of each row, float32 [out], without a gradient.

        ``stored`` is W as it is stored, whose squares the dtype of the products might not hold. A W in few bits is
        decoded only once ``after``, of any shape, is computed.
        """
        weight = self.stop_gradient(self.cast(stored[0], mstype.float32))
        return self.row_sum(self.mul(weight, weight), 1)

    def by_rows(self, stored: Tuple[Parameter, ...]) -> Rows:
        """W in NumPy, of which rows are read as ``[begin:end]``."""
        return to_array(stored[0])

    def with_bias(self, y: Tensor, bias: Optional[Parameter]) -> Tensor:
        """y + bias, or y if the cell adds none."""
        return self.bias_add(y, self.cast(bias, self.dtype)) if self.has_bias else y

    def linear(self, x: Tensor, weight: Tuple[Tensor, ...], bias: Optional[Parameter]) -> Tensor:
        """x W^T + bias."""
        return self.with_bias(self.product(x, weight), bias)

    def like(self, y: Tensor, x: Tensor) -> Tensor:
        """y with the leading axes and the dtype of the cell's x."""
        return self.cast(self.reshape(y, x.shape[:-1] + (self.out_channels,)), x.dtype)


def check_mindformers_linear(cell: nn.Cell, types: Tuple[type, ...]) -> None:
    """Raises UnsupportedCellError if a cell of MindFormers' newer models, of one of ``types``, can carry no adapter."""
    if isinstance(cell, LoRACell):
        raise UnsupportedCellError(
            f"{type(cell).__name__} has an adapter already: adapters do not stack. Use a network without adapters."
        )
    refuse_own_forward(cell, types, "the adapter's cell")
    if cell.weight is None:
        raise UnsupportedCellError(
            f"{type(cell).__name__} has no weight of its own. Put the adapter on the whole network (apply_lora), in "
            "which an output layer gets the embedding's table (tie_word_embeddings: True)."
        )


def adopt_linear(target: nn.Cell, cell: nn.Cell, base: LinearBase) -> None:
    """Sets the base, sizes and activation of the cell that replaces ``cell``."""
    target.base = base
    target.in_channels, target.out_channels = base.in_channels, base.out_channels
    target.dtype = base.dtype
    target.has_bias = base.has_bias
    target.activation_flag = getattr(cell, "activation_flag", False)
    target.activation = cell.activation if target.activation_flag else None


class HeldWeight:
    """Mixin of the cells that hold a quantized W, their own or that of adopt_weight.

    Attributes:
        in_integers (bool): Whether it is in integers rather than in NF4.
    """

    in_integers: bool

    def packed_weight(self) -> Tuple[Parameter, ...]:
        """The tensors of W, as LinearBase.product takes them."""
        if self.in_integers:
            return self.weight, self.weight_zeros, self.weight_scales
        return self.weight, self.weight_absmax, self.weight_scales, self.weight_offsets


def adopt_weight(target: nn.Cell, cell: nn.Cell) -> None:
    """Gives ``target`` the weight of a cell, W or the tensors of a quantized one, and its bias, if any."""
    names = getattr(cell, "tensor_names", ("weight",))
    target.packed = len(names) > 1
    target.in_integers = getattr(cell, "in_integers", False)
    for name in names:
        setattr(target, name, getattr(cell, name))
    target.bias = getattr(cell, "bias", None)


def plain_linear_types() -> Tuple[type, ...]:
    """Returns the classes of plain linear cells: nn.Dense, mint.nn.Linear, and MindFormers' Linear if imported."""
    layers = sys.modules.get("mindformers.modules.layers")
    return (nn.Dense, mint.nn.Linear, layers.Linear) if layers else (nn.Dense, mint.nn.Linear)


def parallel_layers() -> Optional[ModuleType]:
    """Returns the module with the linear cells of MindFormers' mcore models, or None if it is not imported."""
    return sys.modules.get(_PARALLEL_LAYERS)


def parallel_linear_types() -> Tuple[type, ...]:
    """Returns the classes of linear cells of MindFormers' mcore models, if they are imported."""
    layers = parallel_layers()
    return (layers.ColumnParallelLinear, layers.RowParallelLinear) if layers else ()


def pynative_linear_types() -> Tuple[type, ...]:
    """Returns the class of linear cells of MindFormers' PyNative models, if it is imported."""
    module = sys.modules.get(_PYNATIVE_LINEAR)
    return (module.Linear,) if module else ()


def channels_of(cell: nn.Cell) -> Tuple[Optional[int], Optional[int]]:
    """Returns (in_channels, out_channels) of a linear cell, with or without an adapter; None where it lacks one."""
    for size_of_x, size_of_y in _CHANNELS:
        if hasattr(cell, size_of_x):
            return getattr(cell, size_of_x), getattr(cell, size_of_y)
    return None, None


def is_sharded(cell: nn.Cell) -> bool:
    """Returns whether a linear cell has been told how to divide its product between devices."""
    operators = [getattr(cell, name, None) for name in ("matmul", "dense", "morphed_forward")]
    return any(strategy_of(op) or getattr(op, "in_layout", None) is not None for op in operators)


def strategy_of(op: Any) -> Optional[Tuple[Tuple[int, ...], ...]]:
    """Returns how an operator divides its inputs between devices; None if it does not.

    MindFormers gives some models strategies of ones on a single device too, where MindSpore reads none.
    """
    strategy = getattr(op, "in_strategy", None)
    parts = max(itertools.chain.from_iterable(strategy or ()), default=1)
    mode = mindspore.get_auto_parallel_context("parallel_mode").upper()
    return strategy if parts > 1 or mode in SHARDING_MODES else None
