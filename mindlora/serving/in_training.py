"""An engine over a network in training: it shares that network's weights and has its current adapters."""

from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Tuple

import numpy as np
from mindspore import Parameter, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.dtypes import from_float32
from mindlora.core.numerics.nf4 import split_name
from mindlora.core.text import listed
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.matching import check_base
from mindlora.models import names
from mindlora.network.adapter_matching import cell_shapes
from mindlora.network.base_fingerprint import fingerprints_of
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.embedding import embedding_types
from mindlora.network.graph_cache import in_graph_mode
from mindlora.network.load_base import CACHES
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.registry import adaptable_linear_types
from mindlora.network.tree import lora_cells, replace_children, weight_of
from mindlora.ops.frozen_linear import HELD_DTYPES, FrozenGather
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import ServedCells, engine_of
from mindlora.serving.engine import Engine
from mindlora.serving.mcore_network import McoreNetwork
from mindlora.serving.mcore_operators import on_cpu
from mindlora.serving.network import build_network, linear_cells
from mindlora.serving.packed_adapter import Block, PackedAdapter
from mindlora.serving.settings import EngineSettings

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
        networks (mapping): Name -> MindFormers' model in training, with plain LoRA on linear cells: the adapter of that
            name. All have the same parameters for the base, and its weights have been loaded.
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
        in_training = {name: _linear_cells_by_weight(network) for name, network in networks.items()}
        of_first = next(iter(in_training.values()))
        linear: Dict[str, nn.Cell] = {}
        trained: Dict[str, nn.Cell] = {}
        self._adapted: Dict[str, Dict[str, LoRACell]] = {name: {} for name in networks}
        for path, cell in linear_cells(served).items():
            weight = id(weight_of(cell))
            # A tied head has the embedding's weight, and takes no adapter.
            path, there = of_first.get(weight, (path, None))
            linear[path] = cell
            if there is not None:
                trained[path] = there
            for name, cells in in_training.items():
                own = cells[weight][1] if weight in cells else None
                if isinstance(own, LoRACell):
                    self._adapted[name][path] = own
        for name, network in networks.items():
            _check_published(network, self._adapted[name])
        registry = AdapterRegistry(paths=adapters)
        for name in networks:
            registry.publish(name)
        # The network in training determines the order of rows in joined cells.
        shapes = {path: cell._replace(linear=True) for path, cell in cell_shapes(first, trained).items()}
        fingerprint = fingerprints_of(trained)
        cells = ServedCells(linear, shapes, [fingerprint])
        self.engine: Engine = engine_of(served, tokenizer, registry, settings, cells=cells)
        for name in adapters or ():
            self.engine.adapters.memory.load(name)
            loaded = self.engine.adapters.memory.take(name)
            if loaded is not None:
                _check_base(loaded.packed, fingerprint)
        for name in networks:
            self.publish(name)

    def publish(self, name: str = TRAINED) -> None:
        """Makes the current state of an adapter in training the one that new requests get."""
        blocks = {}
        for path, cell in self._adapted[name].items():
            a, b = cell.pair()
            rows = from_float32(np.concatenate([a, b.T], axis=1).astype(np.float32), self.engine.runner.pools.dtype)
            blocks[path] = Block(rows, float(cell.scale))
        nbytes = sum(block.nbytes for block in blocks.values())
        rank = max((len(block.rows) for block in blocks.values()), default=0)
        self.engine.adapters.memory.publish(name, PackedAdapter("an adapter that trains", blocks, nbytes, rank))


def _linear_cells_by_weight(network: nn.Cell) -> Dict[int, Tuple[str, nn.Cell]]:
    """Returns id of a weight -> (adapter path, cell) of the linear cells of a network in training.

    The weight's name has that path under any wrappers of the network; a tied head's weight has the embedding's.
    """
    found = {}
    for path, cell in network.cells_and_names():
        weight = weight_of(cell) if isinstance(cell, (*adaptable_linear_types(), LoRACell)) else None
        prefix = "" if weight is None else weight.name.rpartition(".")[0]
        if prefix and prefix.rpartition(".")[2] == path.rpartition(".")[2]:
            found[id(weight)] = prefix, cell
    return found


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
    cells = {id(cell): cell for cell in linear_cells(served).values() if _there(cell.weight.name, served) in packed}
    prefixes = {key: cell.weight.name.rpartition(".")[0] for key, cell in cells.items()}
    replace_children(served, {key: NF4Dense.from_dense(cell, prefixes[key]) for key, cell in cells.items()})


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
    there = names.parameter_to_mcore(".".join([*path, part, leaf])) or name
    return (there.replace(f".{part_there}.", f".{joined}.") if joined else there) + of_nf4


def _check_published(network: nn.Cell, adapted: Mapping[str, LoRACell]) -> None:
    """Raises UnsupportedCellError if requests would not get the whole adapter."""
    served = set(map(id, adapted.values()))
    left_out = [path for path, cell in lora_cells(network) if id(cell) not in served]
    if left_out:
        raise UnsupportedCellError(
            f"The sampler has no place for the adapters on {listed(left_out)}: leave these cells out of target_modules."
        )
    others = [path for path, cell in lora_cells(network) if not cell.variant.is_plain or cell.invocation_tokens]
    if others:
        raise UnsupportedCellError(
            f"The adapters on {listed(others)} are not plain LoRA on all tokens, which alone is published from memory: "
            "leave the keys of the variant, and alora_invocation_tokens, out of pet_config."
        )
