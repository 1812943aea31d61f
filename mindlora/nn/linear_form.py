"""What the kinds of linear cells have in common: sizes, dtype and operators, under one set of names."""

import itertools
import sys
from types import ModuleType
from typing import Any, NamedTuple, Optional, Tuple

import mindspore
from mindspore import mint, nn, ops
from mindspore.common import dtype as mstype

from mindlora.common.run_modes import SHARDING_MODES

_PARALLEL_LAYERS = "mindformers.parallel_core.training_graph.tensor_parallel.layers"
_PYNATIVE_LINEAR = "mindformers.pynative.layers.linear"


class LinearForm(NamedTuple):
    """A linear cell: y = activation(x W^T + bias).

    Attributes:
        in_channels (int): Size of the last axis of x.
        out_channels (int): Size of the last axis of y.
        dtype (mindspore.dtype): The dtype of the products.
        matmul (Primitive): x W^T.
        bias_add (Primitive or None): Adds the bias; None if the cell adds none.
        activation (Cell or None): None if the cell has none.
    """

    in_channels: int
    out_channels: int
    dtype: mstype.Type
    matmul: Any
    bias_add: Any
    activation: Optional[nn.Cell]


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
    """Returns (in_channels, out_channels) of a linear cell, with an adapter or without one; None where it has none."""
    if isinstance(cell, (*parallel_linear_types(), *pynative_linear_types())):
        return cell.input_size, cell.output_size
    if isinstance(cell, mint.nn.Linear):
        return cell.in_features, cell.out_features
    return getattr(cell, "in_channels", None), getattr(cell, "out_channels", None)


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


def linear_form(cell: nn.Cell) -> LinearForm:
    """Returns what a linear cell computes.

    It is nn.Dense, mint.nn.Linear, MindFormers' Linear, a linear cell of its mcore models, or NF4Dense.
    """
    if isinstance(cell, mint.nn.Linear):
        bias_add = ops.Add() if cell.has_bias else None
        return LinearForm(*channels_of(cell), cell.weight.dtype, cell.dense, bias_add, None)
    if isinstance(cell, parallel_linear_types()):
        # With skip_bias_add, the cell returns its bias beside y, for the caller to add.
        bias_add = cell.add if cell.has_bias and not cell.skip_bias_add else None
        return LinearForm(*channels_of(cell), cell.compute_dtype, cell.matmul, bias_add, None)
    bias_add = cell.bias_add if cell.has_bias else None
    activation = cell.activation if cell.activation_flag else None
    # nn.Dense computes in the dtype of its weight; MindFormers' Linear has a dtype of its own.
    dtype = getattr(cell, "dtype", cell.weight.dtype)
    return LinearForm(cell.in_channels, cell.out_channels, dtype, cell.matmul, bias_add, activation)


def adopt_form(target: nn.Cell, cell: nn.Cell) -> LinearForm:
    """Gives ``target`` the sizes, the bias operator and the activation of a linear cell; returns all of its form."""
    form = linear_form(cell)
    target.in_channels = form.in_channels
    target.out_channels = form.out_channels
    target.has_bias = form.bias_add is not None
    target.bias_add = form.bias_add
    target.activation_flag = form.activation is not None
    target.activation = form.activation
    return form
