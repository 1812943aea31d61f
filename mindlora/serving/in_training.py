"""An engine over a network in training: it shares that network's weights and has its current adapters."""

from typing import Any, Callable, Container, Dict, Iterable, Mapping, Optional, Sequence, Tuple

import numpy as np
from mindspore import Parameter, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.nf4 import split_name
from mindlora.core.text import listed
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.matching import check_base
from mindlora.models import names
from mindlora.network.adapter_matching import cell_shapes
from mindlora.network.base_fingerprint import fingerprints_of
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.embedding import embedding_types
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight
from mindlora.network.graph_cache import in_graph_mode
from mindlora.network.load_base import CACHES
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.registry import adaptable_linear_types
from mindlora.network.tensors import to_array
from mindlora.network.tree import Tree, lora_cells, replace_children, weight_of
from mindlora.ops.frozen_linear import HELD_DTYPES, FrozenGather
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import ServedCells, engine_of
from mindlora.serving.engine import Engine
from mindlora.serving.mcore_network import McoreNetwork
from mindlora.serving.mcore_operators import on_cpu
from mindlora.serving.network import build_network, linear_cells, stacked_experts
from mindlora.serving.packed_adapter import Block, PackedAdapter, pair_rows, row_gains
from mindlora.serving.settings import EngineSettings
from mindlora.serving.stacked_experts import Nf4StackedExperts

# The name under which requests ask for the adapter in training, if there is only one.
TRAINED = "trained"
# The joined cells of a served mcore network, and the cell of Hugging Face's whose name gives theirs in training.
_JOINED = {"linear_qkv": ("q_proj", "linear_q", "linear_qkv"), "gate_up_proj": ("gate_proj", "gating", "linear_fc1")}


class TrainedEngine:
    """An engine for the model that a network trains, in the same process, with one copy of the weights.

    It owns the key-value cache and the slots of each pool. Requests for an adapter in training get its state at
    the last call of ``publish``, None gets the base, and other names get adapters of files, which are joined and
    checked as load_lora does on the network in training. While the engine has requests, training computes in turns
    (Engine.turns).

    Args:
        networks (mapping): Name -> MindFormers' model in training, with plain LoRA on linear cells and experts, or
            DoRA on linear cells, on a CPU: the adapter of that name. All have the same parameters for the base, and its
            weights have been loaded.
        model (mapping): The node ``model`` of its YAML.
        tokenizer: The result of load_tokenizer.
        settings (EngineSettings): The engine's sizes.
        adapters (mapping): Name -> path of adapters of files, in any form that is served. Default: none.

    Raises:
        ConfigError: The model cannot be served, or a path does not exist.
        UnsupportedCellError: An adapter is of a variant, or on a cell, that is not published from memory.
        AdapterError: The adapter of a file cannot be used, or was trained on another base.
    """

    # Cells choose their operators for the graphs that they become.
    @in_graph_mode()
    def __init__(
        self,
        networks: Mapping[str, nn.Cell],
        model: Mapping[str, Any],
        tokenizer: Any,
        settings: EngineSettings,
        adapters: Optional[Mapping[str, str]] = None,
    ):
        for network in networks.values():
            # Otherwise MindSpore draws a new adapter's values when it compiles training, after the first was published.
            network.init_parameters_data()
        served = build_network(model, settings, in_training=True)
        first = next(iter(networks.values()))
        _quantize_as(served, first)
        share_base(served, first)
        in_training = {name: _cells_by_weight(network) for name, network in networks.items()}
        of_first = next(iter(in_training.values()))
        linear: Dict[str, nn.Cell] = {}
        weights: Dict[str, Parameter] = {}
        for path, cell in linear_cells(served).items():
            weight = weight_of(cell)
            # A tied head has the embedding's weight, and takes no adapter.
            path, _ = of_first.get(id(weight), (path, None))
            linear[path], weights[path] = cell, weight
        for experts in stacked_experts(served).values():
            of_experts = [getattr(experts, name) for name in experts.shapes]
            weights.update({weight.name: weight for weight in of_experts})
        trained = _cells_of(weights, of_first)
        self._adapted: Dict[str, Dict[str, LoRACell]] = {}
        for name, network in networks.items():
            cells = _cells_of(weights, in_training[name])
            self._adapted[name] = {path: cell for path, cell in cells.items() if isinstance(cell, LoRACell)}
            _check_published(network, self._adapted[name])
        registry = AdapterRegistry(paths=adapters)
        for name in networks:
            registry.publish(name)
        # The network in training determines the order of rows in joined cells.
        shapes = {
            path: shape if shape.experts else shape._replace(linear=True)
            for path, shape in cell_shapes(first, trained).items()
        }
        fingerprint = fingerprints_of(trained)
        served_cells = ServedCells(linear, shapes, [fingerprint])
        self.engine: Engine = engine_of(served, tokenizer, registry, settings, cells=served_cells)
        self._rows_of_experts = None if on_cpu() else settings.max_rank
        for name in adapters or ():
            self.engine.adapters.memory.load(name)
            loaded = self.engine.adapters.memory.take(name)
            if loaded is not None:
                _check_base(loaded.packed, fingerprint)
        for name in networks:
            self.publish(name)

    def publish(self, name: str = TRAINED) -> None:
        """Makes the current state of an adapter in training the one that new requests get."""
        blocks = {path: self._block(path, cell) for path, cell in self._adapted[name].items()}
        nbytes = sum(block.nbytes for block in blocks.values())
        rank = max((cell.lora_rank for cell in self._adapted[name].values()), default=0)
        self.engine.adapters.memory.publish(name, PackedAdapter("an adapter that trains", blocks, nbytes, rank))

    def _block(self, path: str, cell: LoRACell) -> Block:
        """Returns the content of the slot for the current state of a cell's adapter."""
        a, b = (part.astype(np.float32) for part in cell.pair())
        rows = pair_rows(a, b, self.engine.runner.pools.dtype, self._rows_of_experts)
        scale, gain = float(cell.scale), None
        if cell.variant.row_norms:
            # It makes sure that there are magnitudes.
            cell.prepare()
            magnitude = to_array(cell.parts()[cell.variant.row_norms])
            gain = row_gains(cell.by_rows(), (a, b), scale, magnitude, f"The adapter that trains at {path}")
        return Block(rows, scale, gain)


def _cells_by_weight(network: nn.Cell) -> Dict[int, Tuple[str, nn.Cell]]:
    """Returns id of a weight -> (adapter path, cell) of the linear cells of a network in training, and of the stacked
    weights of its experts.

    The weight's name has that path under any wrappers of the network; a tied head's weight has the embedding's.
    """
    found = {}
    for path, cell in Tree(network).cells.items():
        if isinstance(cell, (ExpertWeight, LoRAExpertWeight)):
            found[id(cell.weight)] = cell.weight.name, cell
            continue
        weight = weight_of(cell) if isinstance(cell, (*adaptable_linear_types(), LoRACell)) else None
        prefix = "" if weight is None else weight.name.rpartition(".")[0]
        if prefix and prefix.rpartition(".")[2] == path.rpartition(".")[2]:
            found[id(weight)] = prefix, cell
    return found


def _cells_of(weights: Mapping[str, Parameter], cells: Mapping[int, Tuple[str, nn.Cell]]) -> Dict[str, nn.Cell]:
    """Returns path -> cell in training for path -> weight of those that have one."""
    return {path: cells[id(weight)][1] for path, weight in weights.items() if id(weight) in cells}


def _check_base(packed: PackedAdapter, fingerprint: Callable[[Iterable[str]], Optional[dict]]) -> None:
    """Raises BaseMismatchError if an adapter was trained on the same cells of another base.

    A file has the parts of joined cells, and the rejoined pairs are those of its training.
    """
    current = fingerprint(packed.blocks)
    if packed.fingerprint and current and packed.fingerprint.get("shapes") == current["shapes"]:
        check_base(Adapter({}, fingerprint=packed.fingerprint), packed.source, lambda: current, "error")


def _quantize_as(served: nn.Cell, network: nn.Cell) -> None:
    """Gives the served network, which has no values yet, cells in NF4 like the one in training."""
    packed = {name for name, parameter in _parameters(network).items() if parameter.dtype == mstype.uint8}
    replacements: Dict[int, nn.Cell] = {}
    for cell in linear_cells(served).values():
        if _there(cell.weight.name, served) in packed:
            replacements[id(cell)] = NF4Dense.from_dense(cell, cell.weight.name.rpartition(".")[0])
    for path, experts in stacked_experts(served).items():
        there = [_there(getattr(experts, name).name, served) for name in experts.shapes]
        if packed.intersection(there):
            _check_both_packed(there, packed)
            replacements[id(experts)] = Nf4StackedExperts(experts, path)
    replace_children(served, replacements)


def _check_both_packed(weights: Sequence[str], packed: Container[str]) -> None:
    """Raises UnsupportedCellError if one weight of experts is in NF4, and the other one in float."""
    in_float = [name for name in weights if name not in packed]
    if in_float:
        raise UnsupportedCellError(
            f"{listed(in_float)} is in float, but the other weight of these experts in NF4, and the sampler computes "
            "with both in one form. Name both in pet_config.quantize_exclude, or neither."
        )


def _parameters(network: nn.Cell) -> Dict[str, Parameter]:
    return {parameter.name: parameter for parameter in network.get_parameters()}


def _there(name: str, served: nn.Cell) -> str:
    """Returns the name, in the network in training, of a parameter of the served network."""
    return _name_in_training(name) if isinstance(served, McoreNetwork) else name


def share_base(served: nn.Cell, network: nn.Cell) -> None:
    """Gives a network of build_network(in_training=True) the weights of the one in training, in place.

    Raises:
        UnsupportedCellError: The network in training holds its weights in another form.
    """
    trained = _parameters(network)
    for _, cell in served.cells_and_names():
        for attribute, parameter in list(cell.parameters_and_names(expand=False)):
            if parameter.name.endswith(CACHES):
                continue
            name = _there(parameter.name, served)
            found = trained.get(name)
            if found is None or found.shape != parameter.shape:
                has = "no such parameter" if found is None else f"one of shape {found.shape}"
                raise UnsupportedCellError(
                    f"The sampler needs {name} of shape {parameter.shape}, and the network in training has {has}: "
                    "train this model by reinforcement with its cells as mindlora configs writes them."
                )
            setattr(cell, attribute, _as_served(parameter, found))
        if on_cpu() and isinstance(cell, embedding_types()) and weight_of(cell).dtype in HELD_DTYPES:
            cell.gather = FrozenGather()


def _as_served(parameter: Parameter, trained: Parameter) -> Parameter:
    """Returns the parameter in training, or a copy for vectors of another dtype, such as norms in 16 bits."""
    if trained.dtype == parameter.dtype or trained.ndim > 1:
        return trained
    return Parameter(trained.astype(parameter.dtype), name=parameter.name, requires_grad=False)


def _name_in_training(name: str) -> str:
    """Returns MindFormers' name in an mcore model of a parameter of a served mcore network."""
    name, of_nf4 = split_name(name)
    *path, cell, leaf = name.split(".")
    part, part_there, joined = _JOINED.get(cell, (cell, "", ""))
    renamed = ".".join([*path, part, leaf])
    # A stacked weight of experts is a parameter by the path under which it takes an adapter.
    there = names.parameter_to_mcore(renamed) or names.to_mcore(renamed)
    return (there.replace(f".{part_there}.", f".{joined}.") if joined else there) + of_nf4


def _check_published(network: nn.Cell, adapted: Mapping[str, LoRACell]) -> None:
    """Raises UnsupportedCellError if requests would not get the whole adapter."""
    served = set(map(id, adapted.values()))
    left_out = [path for path, cell in lora_cells(network) if id(cell) not in served]
    if left_out:
        raise UnsupportedCellError(
            f"The sampler has no place for the adapters on {listed(left_out)}: leave these cells out of target_modules."
        )
    others = [path for path, cell in lora_cells(network) if not _is_publishable(cell)]
    if others:
        raise UnsupportedCellError(
            f"The adapters on {listed(others)} are neither plain LoRA nor, on a CPU, DoRA, on all tokens, which alone "
            "are published from memory: leave the keys of the variant, and alora_invocation_tokens, out of pet_config."
        )


def _is_publishable(cell: LoRACell) -> bool:
    of_norms = bool(cell.variant.row_norms) and on_cpu()
    return (cell.variant.is_plain or of_norms) and not cell.invocation_tokens
