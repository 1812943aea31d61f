"""Compiles equal layers once, where MindSpore would compile each of them."""

import types
from typing import Any, List, Optional, Set, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

# Attributes that differ between equal cells: their time of creation, their children and parameters, which are
# compared by themselves, and MindFormers' number of a layer, which only its KV cache and its sharding read.
_OF_ITS_OWN = {"_create_time", "layer_id"}


def compile_layers_once(network: nn.Cell) -> None:
    """Marks equal cells in a network's lists called layers, so that MindSpore's frontend compiles one of them.

    This is what mindspore.lazy_inline with policy "front" does for cells whose class and arguments are equal. Here the
    cells are compared in their current state, adapters included: those that differ in anything but the values of their
    parameters are compiled separately. Only in graph mode on a CPU, where it was tested: MindFormers has its own
    lazy_inline for pipelines on Ascend.
    """
    if ms.get_context("device_target") != "CPU" or ms.get_context("mode") != ms.GRAPH_MODE:
        return
    for path, layers in network.cells_and_names():
        if path.rpartition(".")[2] == "layers" and isinstance(layers, nn.CellList):
            _mark(list(layers), path)


def _mark(layers: List[nn.Cell], path: str) -> None:
    groups: List[List[nn.Cell]] = []
    for layer in layers:
        group = next((group for group in groups if are_alike(group[0], layer)), None)
        if group is None:
            groups.append([layer])
        else:
            group.append(layer)
    for number, group in enumerate(groups):
        for layer in group:
            # The attributes that lazy_inline sets; equal names stand for equal graphs.
            layer.cell_init_args = f"lazy_inline_{type(layer).__name__}_{path}_{number}"
            layer.no_inline = False


def mark_reference(network: nn.Cell) -> None:
    """Distinguishes the layers of a reference, a copy of a marked network without adapters, from the network's."""
    for _, cell in network.cells_and_names():
        mark = getattr(cell, "cell_init_args", "")
        if mark.startswith("lazy_inline_"):
            cell.cell_init_args = f"{mark}_reference"


def are_alike(first: Any, second: Any, compared: Optional[Set[Tuple[int, int]]] = None) -> bool:
    """Returns whether two cells, or their contents, would be the same graph, whatever their parameters' values."""
    compared = set() if compared is None else compared
    pair = (id(first), id(second))
    if first is second or pair in compared:
        return True
    if type(first) is not type(second):
        return False
    compared.add(pair)
    if isinstance(first, Parameter):
        return _kind(first) == _kind(second)
    if isinstance(first, Tensor):
        return _kind(first) == _kind(second) and np.array_equal(first.asnumpy(), second.asnumpy())
    if isinstance(first, ops.Primitive):
        return repr(first) == repr(second) and are_alike(first.attrs, second.attrs, compared)
    if isinstance(first, types.MethodType):
        return first.__func__ is second.__func__ and are_alike(first.__self__, second.__self__, compared)
    if isinstance(first, nn.Cell):
        first, second = vars(first), vars(second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            are_alike(value, second[key], compared) for key, value in first.items() if key not in _OF_ITS_OWN
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(lambda a, b: are_alike(a, b, compared), first, second))
    return bool(first == second)


def _kind(tensor):
    return tensor.shape, tensor.dtype, tensor.requires_grad if isinstance(tensor, Parameter) else None
