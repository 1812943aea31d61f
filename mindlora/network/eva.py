"""EVA: A begins with the principal directions of each cell's input, and ranks go where they explain the most."""

import contextlib
import dataclasses
import re
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindlora.core.errors import ConfigError, DataError, UnsupportedCellError
from mindlora.core.fields import FRACTION, check_number, numbers
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.initializers import PrincipalComponents
from mindlora.core.numerics.pair_shapes import LINEAR
from mindlora.core.text import listed
from mindlora.files.adapters.adapter import Adapter
from mindlora.models.description import AdaptableCell
from mindlora.models.lora_config import LoraConfig
from mindlora.models.target_modules import patterns_of
from mindlora.models.trainable import select
from mindlora.network.adapter_matching import split_joined
from mindlora.network.base_fingerprint import fingerprint_of
from mindlora.network.cells.cell import carry_settings
from mindlora.network.cells.linear_base import channels_of, parallel_linear_types
from mindlora.network.registry import describe
from mindlora.network.tensors import to_array
from mindlora.network.tree import Tree, replace_children

# Tokens [B, S], and which of them count.
Batch = Tuple[np.ndarray, np.ndarray]
# Paths of cells with the same input -> that input, float32 [tokens, in].
Rows = Dict[Tuple[str, ...], np.ndarray]
# Runs the network on tokens, int32 [B, S], and returns the rows of those that count, bool [B, S].
Read = Callable[[np.ndarray, np.ndarray], Rows]


@dataclasses.dataclass(frozen=True)
class EvaResult:
    """The result of eva_adapter.

    Attributes:
        adapter (Adapter): A of each cell that has a rank, [rank, in]; B is zero. The pair of a joined cell is split
            into pairs of its parts, which share A, as in a PEFT folder.
        ranks (dict): Path -> rank of each selected cell, 0 for cells that get no adapter.
        keys (dict): Fields of LoraConfig with which a network gets cells of these ranks.
        batches (int): Number of batches that were read.
        unsettled (tuple of str): Paths of cells whose directions still changed by more than tau at the end.
    """

    adapter: Adapter
    ranks: Dict[str, int]
    keys: Dict[str, Any]
    batches: int
    unsettled: Tuple[str, ...]


def eva_adapter(
    network: nn.Cell, batches: Iterable[Batch], config: LoraConfig, rho: float = 2.0, tau: float = 0.99
) -> EvaResult:
    """Returns the adapter with which EVA begins: A = V_r, the leading principal components of each cell's input; B = 0.

    The ranks of all cells together stay what ``config`` says. Each goes to the component that explains the largest
    share of the variance of its cell's input, so that a cell has between 0 and rho r of them. The scale of each cell
    stays lora_alpha / r.

    Args:
        network (nn.Cell): A network without adapters, its base loaded; called with tokens [B, S], int32. It is run in
            PyNative mode, one of MindFormers' mcore models as a graph, and not changed.
        batches (iterable of (tokens, counted)): int32 [B, S] and bool [B, S], the tokens whose inputs count. Reading
            ends once all components are settled, or with the last batch. An mcore model takes no batch larger than the
            first.
        config (LoraConfig): A plain LoRA on linear cells.
        rho (float): The largest rank of a cell as a multiple of its configured rank; at least 1. Default: 2.0.
        tau (float): The cosine of a component with itself one batch earlier from which on it counts as settled.
            Default: 0.99.

    Raises:
        ConfigError: ``config`` selects another variant or initializer, or rho or tau is out of range.
        UnsupportedCellError: A selected cell is not linear.
        DataError: No more tokens counted than one cell has components.

    Source: Paischer et al., One Initialization to Rule them All: Fine-tuning via Explained Variance Adaptation, 2024.
    """
    _check(config, rho, tau)
    tree = Tree(network)
    tree.give_heads_their_tables()
    cells = tree.cells
    selected = select(describe(tree, config), config).cells
    _check_linear(selected)
    ranks = {path: config.for_cell(cell.prefix).lora_rank for path, cell in selected.items()}
    most = {path: min(round(rank * rho), selected[path].shape[1]) for path, rank in ranks.items()}
    search = _Search(most, sum(ranks.values()), tau)
    number = 0
    with reading(network, {path: cells[path] for path in selected}) as read:
        for tokens, counted in batches:
            number += 1
            search.update(read(tokens, counted))
            if not search.unsettled():
                break
    return _result(search, selected, tree, config, number)


def _check(config: LoraConfig, rho: float, tau: float) -> None:
    check_number(rho, "rho", numbers(1))
    check_number(tau, "tau", FRACTION)
    if config.variant.name != "LoRA" or config.quantize_base:
        other = config.variant.name if config.variant.name != "LoRA" else f"quantize_base {config.quantize_base}"
        raise ConfigError(
            f"EVA computes A for plain LoRA on a float base, but pet_config has {other}. Leave that out to compute the "
            "adapter."
        )
    if config.alora_invocation_tokens:
        raise ConfigError(
            "EVA looks at the inputs of all tokens, but alora_invocation_tokens is set. Leave that out to compute the "
            "adapter."
        )
    if config.lora_init:
        raise ConfigError(f"lora_init is {config.lora_init!r}, but EVA is an initialization itself. Remove lora_init.")


def _check_linear(selected: Mapping[str, AdaptableCell]) -> None:
    others = [path for path, cell in selected.items() if cell.layout is not LINEAR]
    if others:
        raise UnsupportedCellError(
            f"EVA needs the inputs of linear cells, and target_modules selects {listed(others)}. Leave them out."
        )


class _Search:
    """The components of all inputs so far, and the resulting ranks."""

    def __init__(self, most: Mapping[str, int], budget: int, tau: float):
        self._most = most
        self._budget = budget
        self._tau = tau
        self._components: Dict[Tuple[str, ...], PrincipalComponents] = {}
        self._waiting: Dict[Tuple[str, ...], List[np.ndarray]] = {}
        self._similarities: Dict[Tuple[str, ...], np.ndarray] = {}

    def update(self, inputs: Mapping[Tuple[str, ...], np.ndarray]) -> None:
        """Adds the inputs of cells whose components are not settled yet."""
        unsettled = set(self.unsettled())
        for paths, rows in inputs.items():
            if paths in self._components and unsettled.isdisjoint(paths):
                continue
            count = max(self._most[path] for path in paths)
            components = self._components.setdefault(paths, PrincipalComponents(count))
            waiting = self._waiting.setdefault(paths, [])
            waiting.append(rows)
            # A decomposition needs as many rows as it has components.
            if sum(map(len, waiting)) < count:
                continue
            before = components.components
            components.update(np.concatenate(waiting))
            waiting.clear()
            if before is not None:
                self._similarities[paths] = np.abs((before * components.components).sum(axis=1))

    def ranks(self) -> Dict[str, int]:
        """Returns path -> rank: the budget goes to the components that explain the largest shares."""
        shares = []
        for paths, components in self._components.items():
            for path in paths:
                for share in components.explained[: self._most[path]]:
                    shares.append((share, path))
        shares.sort(key=lambda item: -item[0])
        ranks = dict.fromkeys(self._most, 0)
        for _, path in shares[: self._budget]:
            ranks[path] += 1
        return ranks

    def unsettled(self) -> List[str]:
        """Returns the paths of cells with a component in use that is not settled."""
        if len(self._similarities) < len(self._components):
            return list(self._most)
        ranks = self.ranks()
        changing = []
        for paths, similarities in self._similarities.items():
            changing += [path for path in paths if (similarities[: ranks[path]] < self._tau).any()]
        return changing

    def too_few(self) -> List[str]:
        """Returns the paths of cells with fewer counted tokens than components."""
        empty = []
        for paths, components in self._components.items():
            if components.components is None:
                empty += paths
        return empty

    def directions(self) -> Iterator[Tuple[str, np.ndarray]]:
        """Yields the path of each cell with its components, float32 [count, in]."""
        for paths, components in self._components.items():
            for path in paths:
                yield path, components.components


def _result(
    search: _Search, selected: Mapping[str, AdaptableCell], tree: Tree, config: LoraConfig, read: int
) -> EvaResult:
    if not read or search.too_few():
        raise DataError(
            f"{read} batches were read, in which too few tokens count for the components of "
            f"{listed(search.too_few() or list(selected))}. Give more rows, or a smaller rho or lora_rank."
        )
    ranks = search.ranks()
    adapter = Adapter({}, use_rslora=config.use_rslora, dropout=config.lora_dropout)
    for path, directions in search.directions():
        rank, prefix = ranks[path], selected[path].prefix
        if rank == 0:
            continue
        own = config.for_cell(prefix)
        adapter.tensors[prefix, "A"] = np.ascontiguousarray(directions[:rank])
        adapter.tensors[prefix, "B"] = np.zeros((selected[path].shape[0], rank), np.float32)
        adapter.alphas[prefix] = own.lora_alpha * adapter.alpha_growth(rank / own.lora_rank)
    adapted = {selected[path].prefix: tree.cells[path] for path in selected if ranks[path]}
    adapter.fingerprint = fingerprint_of(adapted)
    by_prefix = {cell.prefix: ranks[path] for path, cell in selected.items()}
    keys = _keys(config, adapter, by_prefix)
    split_joined(adapter, tree.network, adapted)
    return EvaResult(adapter, by_prefix, keys, read, tuple(search.unsettled()))


def _keys(config: LoraConfig, adapter: Adapter, ranks: Mapping[str, int]) -> Dict[str, Any]:
    """Returns the fields of LoraConfig that give each cell its rank and scale, and cells of rank 0 no adapter."""
    adapted = {path: rank for path, rank in ranks.items() if rank}
    rank_pattern = {pattern: ranks[paths[0]] for pattern, paths in patterns_of(adapted).items()}
    alpha_pattern = {pattern: adapter.alphas[paths[0]] for pattern, paths in patterns_of(adapter.alphas).items()}
    keys: Dict[str, Any] = {
        "rank_pattern": {pattern: rank for pattern, rank in rank_pattern.items() if rank != config.lora_rank},
        "alpha_pattern": {pattern: alpha for pattern, alpha in alpha_pattern.items() if alpha != config.lora_alpha},
    }
    without = [path for path, rank in ranks.items() if not rank]
    if without and isinstance(config.exclude_modules, str):
        keys["exclude_modules"] = "|".join([config.exclude_modules, *map(re.escape, without)])
    elif without:
        keys["exclude_modules"] = [*(config.exclude_modules or ()), *without]
    return keys


@contextlib.contextmanager
def reading(network: nn.Cell, cells: Mapping[str, nn.Cell]) -> Iterator[Read]:
    """Makes the inputs of a network's linear cells, by path, readable within the context.

    MindFormers' mcore models run as a graph, where hooks do not run; other networks run in PyNative mode.

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
    """A linear cell of an mcore model that keeps its input.

    Args:
        cell (nn.Cell): The cell; its parameters keep their names.
        path (str): Its path.

    Inputs:
        - **x** (Tensor) - Shape [S, B, in].
        - **weight** (Tensor) - The embedding's table, which a tied output layer is handed. Default: None.

    Outputs:
        The output of the cell.
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
        # A graph and its output have a fixed size: a smaller batch is padded with rows that do not count.
        missing = ((0, size - len(tokens)), (0, 0))
        network(Tensor(np.pad(tokens, missing, mode="edge")))
        # The cells of mcore models get the first token of all rows, then the second.
        counts = np.pad(counted, missing).T.reshape(-1)
        return {(path,): to_float32(to_array(keeper.kept))[counts] for path, keeper in keepers.items()}

    try:
        yield read
    finally:
        replace_children(network, {id(keeper): keeper.cell for keeper in keepers.values()})
