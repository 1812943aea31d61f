"""AdapterStack: adapters that train side by side on one network, and a separate network for each of them."""

from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindlora.core.errors import ConfigError, UnsupportedCellError
from mindlora.core.text import listed
from mindlora.models.lora_config import NF4, LoraConfig
from mindlora.network.apply import apply_lora, freeze_base
from mindlora.network.cells.cell import InitialDraws
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight
from mindlora.network.cells.parallel_linear import LoRAParallelLinear, QLoRAParallelLinear
from mindlora.network.cells.routed_experts import holders_with
from mindlora.network.cells.stacked import StackedLoRADense, StackedLoRAExpertWeight, StackedLoRAParallelLinear
from mindlora.network.pynative.linear import LoRAPyNativeLinear, StackedLoRAPyNativeLinear
from mindlora.network.pynative.nf4 import QLoRAPyNativeLinear
from mindlora.network.quantize import quantize_base
from mindlora.network.quantized.nf4 import QLoRADense
from mindlora.network.tree import Tree, copy_cells, lora_cells, replace_children

# Cells whose adapters can be stacked, and their stacked classes.
_STACKED = {
    LoRADense: StackedLoRADense,
    QLoRADense: StackedLoRADense,
    LoRAParallelLinear: StackedLoRAParallelLinear,
    QLoRAParallelLinear: StackedLoRAParallelLinear,
    LoRAExpertWeight: StackedLoRAExpertWeight,
    LoRAPyNativeLinear: StackedLoRAPyNativeLinear,
    QLoRAPyNativeLinear: StackedLoRAPyNativeLinear,
}


class Slice(NamedTuple):
    """One adapter's part of a parameter that holds all adapters."""

    stacked: Parameter  # [K, ...]
    number: int  # the adapter's number
    own: Parameter  # [...], at most as large in each axis: the stacked parameter is zero beyond it

    @property
    def place(self) -> tuple:
        """The index of the part in the stacked parameter."""
        return (self.number, *map(slice, self.own.shape))


def pull(slices: Iterable[Slice]) -> None:
    """Copies the stacked parameters' values to the adapters' own parameters."""
    for each in slices:
        values = each.stacked.asnumpy()[each.place]
        each.own.set_data(Tensor(np.ascontiguousarray(values), each.own.dtype))


def push(slices: Iterable[Slice]) -> None:
    """Copies the adapters' own parameters to their parts of the stacked parameters."""
    arrays: Dict[int, np.ndarray] = {}
    parameters: Dict[int, Parameter] = {}
    for each in slices:
        key = id(each.stacked)
        parameters[key] = each.stacked
        arrays.setdefault(key, each.stacked.asnumpy().copy())[each.place] = each.own.asnumpy()
    for key, parameter in parameters.items():
        # Not set_data: a compiled graph would keep the old value of a parameter used only in a branch.
        ops.assign(parameter, Tensor(arrays[key], parameter.dtype))


class AdapterStack:
    """K adapters on one network with StackedLoRADense cells and, for experts, StackedLoRAExpertWeight.

    Attributes:
        networks (list): A separate network for each adapter, with LoRADense cells and the base's shared parameters. It
            does not run: functions for networks with one adapter (save_lora, load_lora, ...) work on it, between pull
            and push.
        cells (dict): Path -> StackedLoRADense or StackedLoRAExpertWeight.
    """

    def __init__(self, networks: List[nn.Cell], cells: Dict[str, StackedLoRADense], seeds: Sequence[Optional[int]]):
        self.networks = networks
        self.cells = cells
        self._seeds = seeds

    @property
    def count(self) -> int:
        """K."""
        return len(self.networks)

    def slices(self, number: int) -> List[Slice]:
        """Returns the parts of the stacked parameters that are an adapter's A and B."""
        found = []
        for path, cell in lora_cells(self.networks[number]):
            stacked = self.cells[path]
            found += [Slice(both, number, own) for both, own in zip(stacked.lora_parameters(), cell.lora_parameters())]
        return found

    def set_initial_values(self) -> None:
        """Sets the stack to its adapters' initial values; draws them now, if MindSpore has delayed that.

        Each adapter gets the same values as alone: all draw from the same state of NumPy's generator, or from their own
        seeds.
        """
        state = np.random.get_state()
        for network, seed in zip(self.networks, self._seeds):
            np.random.set_state(state)
            with InitialDraws(seed):
                draw(network)
        for number in range(self.count):
            push(self.slices(number))


def draw(network: nn.Cell) -> None:
    """Draws the initial values of a network's adapter, if MindSpore has delayed that."""
    adapter = {id(parameter) for _, cell in lora_cells(network) for parameter in cell.lora_parameters()}
    for parameter in network.get_parameters():
        if id(parameter) in adapter:
            parameter.init_data()


def stack_adapters(
    network: nn.Cell, configs: Sequence[LoraConfig], seeds: Optional[Sequence[Optional[int]]] = None
) -> AdapterStack:
    """Puts K adapters on a network, in place, and freezes the rest; they are zero until set_initial_values.

    Args:
        network (nn.Cell): A network of linear cells, and of routed experts, without adapters.
        configs (sequence of LoraConfig): Plain LoRA each, alike in quantize_base, lora_dropout and dtypes.
        seeds (sequence of int or None): The seed of each adapter's initial values. Default: None, no adapter has one.

    Raises:
        LoraError: As in apply_lora, for any of the adapters; the network is unchanged, except for a quantized base.
    """
    first = configs[0]
    if any(config.alora_invocation_tokens for config in configs):
        raise ConfigError(
            "alora_invocation_tokens is set for one of several adapters, which act on all tokens of their rows. Train "
            "it in a run of its own."
        )
    seeds = seeds or [None] * len(configs)
    if first.quantize_base == NF4:
        quantize_base(network, first.quantize_exclude)
    networks = []
    state = np.random.get_state()
    for config, seed in zip(configs, seeds):
        own, _ = copy_cells(network)
        np.random.set_state(state)
        with InitialDraws(seed):
            apply_lora(own, config)
            _check_linear(own)
            _make_values(own)
        freeze_base(own)
        networks.append(own)
    cells = _stack(network, networks, first.compute_dtype)
    return AdapterStack(networks, cells, seeds)


def _make_values(network):
    """Creates the initial values of a PyNative model's adapter, which has no values yet."""
    for _, cell in lora_cells(network):
        unmade = [parameter for parameter in cell.lora_parameters() if getattr(parameter, "is_meta", False)]
        for parameter in unmade:
            parameter.data = ops.zeros(parameter.shape, parameter.dtype)
        if unmade:
            cell.reset_adapter()


def _check_linear(network):
    """Raises UnsupportedCellError if an adapter is on cells that do not support stacking."""
    cells = dict(lora_cells(network))
    others = {path: type(cell).__name__ for path, cell in cells.items() if _type_of(cell) not in _STACKED}
    if others:
        path, kind = next(iter(others.items()))
        raise UnsupportedCellError(
            f"{listed(others)} cannot carry several adapters: {path} would be a {kind}, and only linear cells and "
            "routed experts with plain LoRA train beside others. Add it to exclude_modules."
        )
    packed = [path for path, cell in cells.items() if isinstance(cell, LoRAExpertWeight) and cell.quantization]
    if packed:
        raise UnsupportedCellError(
            f"{listed(packed)} cannot carry several adapters in 4 bits. Keep the experts in float, with "
            "quantize_exclude: [mlp.experts.gate_up_proj, mlp.experts.down_proj]."
        )


def _stack(network, networks, compute_dtype):
    """Replaces a network's cells that carry an adapter in any of ``networks``; returns path -> cell."""
    adapted: List[Dict[str, nn.Cell]] = [_by_name(own) for own in networks]
    tree = Tree(network)
    cells, replacements = {}, {}
    experts = []
    for name, base in tree.cells.items():
        present = [each.get(name) for each in adapted]
        if any(present):
            first = next(cell for cell in present if cell is not None)
            stacked = _STACKED[_type_of(first)].from_cells(base, present, compute_dtype)
            cells[first.adapter_path] = replacements[id(base)] = stacked
            if isinstance(base, ExpertWeight):
                experts.append((base, stacked))
    replacements.update(holders_with(tree.modules, experts))
    replace_children(network, replacements)
    return cells


def _type_of(cell):
    """Returns the class of a cell with an adapter; for a PyNative model, the class without MindFormers' Linear."""
    return getattr(cell, "adapter_type", type(cell))


def _by_name(network):
    """Returns a network's cells with adapters, by name."""
    with_adapter = {id(cell) for _, cell in lora_cells(network)}
    return {name: cell for name, cell in network.cells_and_names() if id(cell) in with_adapter}
