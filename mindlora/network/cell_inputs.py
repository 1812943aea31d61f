"""What linear cells of a network read while it runs: by hooks in PyNative mode, or kept by cells in a graph."""

import contextlib
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindlora.core.numerics.dtypes import to_float32
from mindlora.network.cells.cell import carry_settings
from mindlora.network.cells.linear_base import channels_of, parallel_linear_types
from mindlora.network.tensors import to_array
from mindlora.network.tree import replace_children

# Paths of cells that share an input -> that input, float32 [tokens, in].
Rows = Dict[Tuple[str, ...], np.ndarray]
# Runs the network on tokens, int32 [B, S], and returns the rows of those that count, bool [B, S].
Read = Callable[[np.ndarray, np.ndarray], Rows]


@contextlib.contextmanager
def reading(network: nn.Cell, cells: Mapping[str, nn.Cell]) -> Iterator[Read]:
    """Lets the inputs of linear cells of a network, by path, be read as long as the context lasts.

    MindFormers' mcore models run as a graph, which no hook sees into; other networks run in PyNative mode.

    Yields:
        Read. Batches have the same S; those after the first have at most its B.
    """
    in_graph = any(isinstance(cell, parallel_linear_types()) for cell in cells.values())
    mode, training = ms.get_context("mode"), network.training
    ms.set_context(mode=ms.GRAPH_MODE if in_graph else ms.PYNATIVE_MODE)
    network.set_train(False)
    try:
        with (_kept_in_graph if in_graph else _hooked)(network, cells) as read:
            yield read
    finally:
        network.set_train(training)
        ms.set_context(mode=mode)


@contextlib.contextmanager
def _hooked(network: nn.Cell, cells: Mapping[str, nn.Cell]) -> Iterator[Read]:
    seen: List[Tuple[str, Tensor]] = []

    def reader(path: str) -> Callable[[nn.Cell, Tuple[Tensor, ...]], None]:
        def see(_: nn.Cell, inputs: Tuple[Tensor, ...]) -> None:
            seen.append((path, inputs[0]))

        return see

    def read(tokens: np.ndarray, counted: np.ndarray) -> Rows:
        seen.clear()
        network(Tensor(tokens))
        sharing: Dict[int, List[str]] = {}
        tensors: Dict[int, Tensor] = {}
        for path, tensor in seen:
            sharing.setdefault(id(tensor), []).append(path)
            tensors[id(tensor)] = tensor
        rows = {}
        for number, paths in sharing.items():
            array = to_float32(to_array(tensors[number]))
            rows[tuple(paths)] = array.reshape(-1, array.shape[-1])[counted.reshape(-1)]
        seen.clear()
        return rows

    hooks = [cell.register_forward_pre_hook(reader(path)) for path, cell in cells.items()]
    try:
        yield read
    finally:
        for hook in hooks:
            hook.remove()


class _Keeper(nn.Cell):
    """A linear cell of an mcore model that keeps what it reads.

    Args:
        cell (nn.Cell): The cell; its parameters keep their names.
        path (str): Its path.

    Inputs:
        - **x** (Tensor) - Shape [S, B, in].
        - **weight** (Tensor) - The embedding's table, which a tied output layer is handed. Default: None.

    Outputs:
        What the cell returns.
    """

    def __init__(self, cell: nn.Cell, path: str, tokens: int):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.width = channels_of(cell)[0]
        kept = Parameter(ops.zeros((tokens, self.width), cell.compute_dtype), name=f"{path}.input", requires_grad=False)
        # Past nn.Cell, which would list them among the network's parameters; it is the graph that reads the weight.
        self.__dict__.update(kept=kept, weight=cell.weight)
        carry_settings(cell, self)

    def construct(self, x: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Parameter]]:
        rows = x.reshape((-1, self.width)).astype(self.kept.dtype)
        x = ops.depend(x, ops.assign(self.kept, rows))
        return self.cell(x) if weight is None else self.cell(x, weight)


@contextlib.contextmanager
def _kept_in_graph(network: nn.Cell, cells: Mapping[str, nn.Cell]) -> Iterator[Read]:
    keepers: Dict[str, _Keeper] = {}
    size = 0

    def read(tokens: np.ndarray, counted: np.ndarray) -> Rows:
        nonlocal size
        if not keepers:
            size = len(tokens)
            keepers.update({path: _Keeper(cell, path, tokens.size) for path, cell in cells.items()})
            replace_children(network, {id(cells[path]): keeper for path, keeper in keepers.items()})
        # A graph, and what it writes to, has one size: a smaller batch gets rows that do not count.
        missing = ((0, size - len(tokens)), (0, 0))
        network(Tensor(np.pad(tokens, missing, mode="edge")))
        # The cells of mcore models get the first token of all rows, then the second.
        counts = np.pad(counted, missing).T.reshape(-1)
        return {(path,): to_float32(to_array(keeper.kept))[counts] for path, keeper in keepers.items()}

    try:
        yield read
    finally:
        replace_children(network, {id(keeper): keeper.cell for keeper in keepers.values()})
