"""Builds an engine: network, the base's weights, pools, adapter cache, scheduler."""

import os
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.nn.utils import no_init_parameters

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.dtypes import BFLOAT16
from mindlora.core.numerics.folding import Rows
from mindlora.core.text import examples, listed
from mindlora.files.adapters.fingerprint import ROW_ORDERS
from mindlora.files.adapters.matching import CellShape
from mindlora.files.base.convert import in_hugging_face_names
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.files.base.renaming import quantized_weights, with_smaller_groups
from mindlora.models.lora_config import AS_STORED, Patterns
from mindlora.network.adapter_matching import cell_shapes
from mindlora.network.base_fingerprint import Packed, fingerprints_of, joined_fingerprints_of
from mindlora.network.load_base import hold_base, load_base
from mindlora.network.quantize import quantize_base as quantize
from mindlora.network.quantized.nf4 import NF4Dense, matrix_shape
from mindlora.network.quantized.quantized_dense import QuantizedDense
from mindlora.network.tensors import to_array
from mindlora.network.tree import replace_children, weight_of
from mindlora.serving.adapter_memory import AdapterMemory
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.adapter_slots import AdapterSlots
from mindlora.serving.adapter_tables import BaseTables
from mindlora.serving.blocks import BlockPool
from mindlora.serving.detokenizer import end_tokens
from mindlora.serving.engine import Engine
from mindlora.serving.mcore_network import McoreNetwork
from mindlora.serving.mcore_operators import on_cpu
from mindlora.serving.network import FEW_TOKENS, add_pools, build_network, embedding_of, linear_cells, stacked_experts
from mindlora.serving.packed_adapter import ServedLayout, prepare
from mindlora.serving.runner import ModelRunner
from mindlora.serving.scheduler import Scheduler
from mindlora.serving.settings import EngineSettings
from mindlora.serving.stacked_experts import WEIGHTS, Nf4StackedExperts, StackedExperts

# The cells of an mcore network become 4-bit exactly where the checkpoint's weights are.


def quantize_as(network: McoreNetwork, checkpoint: str) -> None:
    """Replaces cells of a network without values by quantized ones, in place, where a file has quantized weights.

    Training quantizes joined cells, and this network has their parts, so quantize_exclude cannot name the cells.

    Raises ConfigError if only one of the two weights of a layer's experts is quantized, or an NPU cannot decode a
    weight (see check_groups), and CheckpointError if the file cannot be read.
    """
    with BaseCheckpoint(checkpoint) as base:
        tensors = in_hugging_face_names(base, network.config.num_heads, network.config.n_kv_heads)
        quantized = set(quantized_weights(tensor.name for tensor in tensors))
    if not on_cpu():
        check_groups({tensor.name: tensor.shape for tensor in tensors}, checkpoint)
    replacements = {}
    with no_init_parameters():
        for path, cell in network.cells_and_names():
            if isinstance(cell, nn.Dense) and f"{path}.weight" in quantized:
                replacements[id(cell)] = NF4Dense.from_dense(cell, path)
            elif isinstance(cell, StackedExperts) and _is_quantized(path, quantized, checkpoint):
                replacements[id(cell)] = Nf4StackedExperts(cell, path)
    replace_children(network, replacements)


def check_groups(shapes: Mapping[str, Tuple[int, ...]], checkpoint: str) -> None:
    """Refuses NF4 weights with groups of fewer than 256 blocks, which only CPU operators decode.

    Args:
        shapes (dict): Name -> shape of the network's tensors.
        checkpoint (str): Their source, for the error.

    Raises:
        ConfigError: There are such weights: parts of a joined weight of the checkpoint.
    """
    smaller = with_smaller_groups(shapes)
    if smaller:
        raise ConfigError(
            f"{checkpoint} joins weights in NF4, but an NPU does not decode their parts: {examples(smaller)}. Serve it "
            "on a CPU, or serve the base in float."
        )


def _is_quantized(path, quantized, checkpoint) -> bool:
    packed = [f"{path}.{name}" for name in WEIGHTS if f"{path}.{name}" in quantized]
    if len(packed) == 1:
        raise ConfigError(
            f"{checkpoint} holds {listed(packed)} in NF4, but the other weight of these experts in float: they are "
            "served in one form. Quantize the base again with --exclude for both weights, or for none."
        )
    return bool(packed)


_NUMPY = {"Float32": np.dtype("<f4"), "Float16": np.dtype("<f2"), "BFloat16": BFLOAT16}


def make_engine(
    model: Mapping[str, Any],
    checkpoint: str,
    tokenizer: Any,
    registry: AdapterRegistry,
    settings: EngineSettings,
    quantize_base: Optional[str] = None,
    quantize_exclude: Patterns = None,
    model_name: str = "base",
) -> Engine:
    """Builds a network with its weights, and an engine around it, which start() starts.

    ``model`` is the model node of a YAML; ``checkpoint`` is as for load_base, ``tokenizer`` from load_tokenizer.
    ``quantize_base`` and ``quantize_exclude`` are as in the LoraConfig with which the checkpoint was quantized.
    Requests name the base by ``model_name``.

    Raises ConfigError or CheckpointError if the model cannot be built or its weights cannot be loaded.
    """
    network = build_network(model, settings)
    if quantize_base == AS_STORED:
        hold_base(network, checkpoint)
    elif quantize_base and isinstance(network, McoreNetwork):
        quantize_as(network, checkpoint)
    elif quantize_base:
        quantize(network, quantize_exclude)
    # Elsewhere weights are copied to the device.
    notes = load_base(network, checkpoint, mapped=ms.get_context("device_target") == "CPU")
    folder = checkpoint if os.path.isdir(checkpoint) else None
    return engine_of(network, tokenizer, registry, settings, model_name, folder, notes)


class ServedCells(NamedTuple):
    """The cells of a network that get a pool, and the data for matching an adapter's file to them.

    Attributes:
        linear (dict): Adapter path -> linear cell.
        shapes (dict): Adapter path -> CellShape of the cells that an adapter's file can adapt, experts included.
        fingerprints (list of callables): As in ServedLayout, one for each possible order of rows in training.
    """

    linear: Dict[str, nn.Cell]
    shapes: Dict[str, CellShape]
    fingerprints: List[Callable[[Iterable[str]], Optional[dict]]]


def served_cells(network: nn.Cell) -> ServedCells:
    """Returns the served cells of a network from build_network that has weights and no pools yet."""
    cells = linear_cells(network)
    return ServedCells(cells, {**cell_shapes(network, cells), **_expert_shapes(network)}, _fingerprints(network, cells))


def engine_of(
    network: nn.Cell,
    tokenizer: Any,
    registry: AdapterRegistry,
    settings: EngineSettings,
    model_name: str = "base",
    base_folder: Optional[str] = None,
    base_notes: Sequence[str] = (),
    cells: Optional[ServedCells] = None,
) -> Engine:
    """Puts pools of adapters on a network from build_network that has weights, and returns an engine around it.

    ``cells`` are the network's, by default from served_cells; other arguments are as in make_engine and
    Engine.
    """
    # From the base's own cells, before the pools replace them and a tied head gets a parameter of its own.
    linear, shapes, (fingerprint, *others) = cells or served_cells(network)
    tables = _tables(network)
    pooled = add_pools(network, linear, settings)
    dtype = _NUMPY[str(next(iter(pooled.values())).lora_pool.dtype)]
    weights = _weights(linear)
    hidden = embedding_of(network)[1].shape[1]
    layout = ServedLayout(
        shapes,
        settings.max_rank,
        dtype,
        fingerprint,
        weights,
        tables,
        hidden,
        max((cell.shapes[name][0] for cell in stacked_experts(network).values() for name in cell.shapes), default=0),
        tuple(others),
        exact=settings.adapter_dtype is not None,
        fills_experts=ms.get_context("device_target") != "CPU",
    )
    runner = ModelRunner(network, pooled, dtype, settings, tables)
    memory = AdapterMemory(registry, lambda path: prepare(path, layout), settings.adapter_memory)
    adapters = AdapterSlots(memory, settings.slots, runner.pools.write)
    scheduler = Scheduler(
        BlockPool(settings.block_count, settings.block_size),
        adapters,
        settings.max_running,
        settings.max_tokens_per_step,
        settings.max_waiting,
        settings.seq_length,
        settings.prompt_lookup,
        FEW_TOKENS,
    )
    ends = end_tokens(tokenizer, network.config.eos_token_id)
    return Engine(runner, scheduler, adapters, tokenizer, ends, model_name, base_folder, tuple(base_notes))


def _fingerprints(network: nn.Cell, cells: Mapping[str, nn.Cell]) -> List[Callable[[Iterable[str]], Optional[dict]]]:
    """Returns a function for the base's fingerprint for each order of rows in training."""
    if not isinstance(network, McoreNetwork):
        return [fingerprints_of(dict(cells))]
    weights = {path: to_array(weight_of(cell)) for path, cell in cells.items()}
    packed = {
        path: Packed(cell.quantization, matrix_shape(cell))
        for path, cell in cells.items()
        if isinstance(cell, QuantizedDense)
    }
    for path, experts in stacked_experts(network).items():
        for name, (count, rows, columns) in experts.shapes.items():
            weights[f"{path}.{name}"] = to_array(getattr(experts, name))
            if isinstance(experts, Nf4StackedExperts):
                packed[f"{path}.{name}"] = Packed("nf4", (count * columns, rows))
    kv_heads = network.config.n_kv_heads
    return [joined_fingerprints_of(weights, kv_heads, layouts, packed) for layouts in ROW_ORDERS]


def _expert_shapes(network: nn.Cell) -> Dict[str, CellShape]:
    """Returns adapter path -> CellShape of the stacked weights of experts."""
    shapes = {}
    for path, experts in stacked_experts(network).items():
        for name, (_, rows, columns) in experts.shapes.items():
            shapes[f"{path}.{name}"] = CellShape(columns, rows, experts=True)
    return shapes


def _weights(cells: Mapping[str, nn.Cell]) -> Optional[Dict[str, Rows]]:
    """Returns adapter path -> weight in MindSpore's own memory on a CPU; None elsewhere, as it would be copied."""
    if ms.get_context("device_target") != "CPU":
        return None
    return {
        path: cell.by_rows() if isinstance(cell, QuantizedDense) else to_array(weight_of(cell))
        for path, cell in cells.items()
    }


def _tables(network: nn.Cell) -> Optional[BaseTables]:
    """Returns the base's embedding and head, or None on devices other than a CPU."""
    if ms.get_context("device_target") != "CPU":
        return None
    table = embedding_of(network)[1]
    head = network.lm_head.weight
    return BaseTables(to_array(table), head is table, to_array(head))
