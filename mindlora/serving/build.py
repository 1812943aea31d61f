"""Puts an engine together: network, the base's weights, pools, adapter cache, scheduler."""

import os
from typing import Any, Dict, Mapping

import numpy as np
from mindspore import Parameter, nn

from mindlora.base.convert import in_mindformers_names
from mindlora.base.joined import join, parts_of
from mindlora.base.reader import BaseCheckpoint
from mindlora.base.writer import OutputTensor
from mindlora.common.text import listed
from mindlora.config import Patterns
from mindlora.errors import CheckpointError, ConfigError
from mindlora.nn.adapter_matching import cell_shapes
from mindlora.nn.base_fingerprint import fingerprints_of
from mindlora.nn.tensors import to_tensor
from mindlora.numerics.dtypes import BFLOAT16
from mindlora.quantize import quantize_base
from mindlora.serving.adapter_memory import AdapterMemory
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.adapter_slots import AdapterSlots
from mindlora.serving.blocks import BlockPool
from mindlora.serving.detokenizer import end_tokens
from mindlora.serving.engine import Engine
from mindlora.serving.network import add_pools, build_network, linear_cells
from mindlora.serving.packed_adapter import ServedLayout, prepare
from mindlora.serving.runner import ModelRunner
from mindlora.serving.scheduler import Scheduler
from mindlora.serving.settings import EngineSettings

_NUMPY = {"Float32": np.dtype("<f4"), "Float16": np.dtype("<f2"), "BFloat16": BFLOAT16}
# What a network for serving has besides the base's weights.
_OWN = (".key_cache", ".value_cache")


def make_engine(
    model: Mapping[str, Any],
    checkpoint: str,
    tokenizer: Any,
    registry: AdapterRegistry,
    settings: EngineSettings,
    quantize: bool = False,
    quantize_exclude: Patterns = None,
    model_name: str = "base",
) -> Engine:
    """Builds MindFormers' network with its weights, and an engine around it, which start() begins.

    ``model`` is that node of a YAML; ``checkpoint`` is as for load_base, ``tokenizer`` as load_tokenizer returns it.
    ``quantize`` and ``quantize_exclude`` are as when the checkpoint was quantized. Callers name the base by
    ``model_name``.

    Raises ConfigError or CheckpointError if the model cannot be built or its weights cannot be loaded.
    """
    network = build_network(model, settings)
    if quantize:
        quantize_base(network, quantize_exclude)
    load_base(network, checkpoint)
    cells = linear_cells(network)
    # From the base's own cells, before the pools take their places.
    shapes = cell_shapes(network, cells)
    fingerprint = fingerprints_of(cells)
    pooled = add_pools(network, cells, settings)
    dtype = _NUMPY[str(next(iter(pooled.values())).dtype)]
    layout = ServedLayout(shapes, settings.max_rank, dtype, fingerprint)
    runner = ModelRunner(network, pooled, dtype, settings)
    memory = AdapterMemory(registry, lambda path: prepare(path, layout), settings.adapter_memory)
    adapters = AdapterSlots(memory, settings.slots, runner.pools.write)
    scheduler = Scheduler(
        BlockPool(settings.block_count, settings.block_size),
        adapters,
        settings.max_running,
        settings.max_tokens_per_step,
        settings.max_waiting,
        settings.seq_length,
    )
    ends = end_tokens(tokenizer, network.config.eos_token_id)
    return Engine(runner, scheduler, adapters, tokenizer, ends, model_name)


def load_base(network: nn.Cell, path: str) -> None:
    """Fills every parameter of a network from a checkpoint of its base, before it gets pools.

    Its linear cells are quantized if the checkpoint, a file or folder with names of MindFormers or Hugging Face, is.

    Raises:
        ConfigError: There is no path, or nothing is there.
        CheckpointError: The file cannot be read, or lacks parameters, or one has another shape or dtype.
    """
    if not path:
        raise ConfigError(
            "load_checkpoint is empty: a model with random weights has nothing to say. Name the base with "
            "--load_checkpoint."
        )
    if not os.path.exists(path):
        raise ConfigError(f"load_checkpoint: {path} does not exist. Correct the path (--load_checkpoint).")
    with BaseCheckpoint(path) as base:
        tensors = {tensor.name: tensor for tensor in in_mindformers_names(base)[0]}
        parameters = {p.name: p for p in network.get_parameters() if not p.name.endswith(_OWN)}
        _add_joined(parameters, tensors, _kv_heads(network))
        missing = sorted(set(parameters) - set(tensors))
        if missing:
            raise CheckpointError(
                f"{path} lacks {len(missing)} parameters of the network: {listed(missing)}. Name the checkpoint of the "
                "model that the YAML describes."
            )
        for name, parameter in parameters.items():
            _fill(parameter, tensors[name], path)


def _kv_heads(network):
    config = network.config
    return config.n_kv_heads or config.num_heads


def _add_joined(parameters: Dict[str, Parameter], tensors: Dict[str, OutputTensor], kv_heads: int) -> None:
    """Makes w_qkv and w_gate_hidden of the tensors that a checkpoint holds apart."""
    for name in set(parameters) - set(tensors):
        parts = parts_of(name)
        if parts and all(part in tensors for part in parts):
            tensors[name] = join(name, [tensors[part] for part in parts], kv_heads)


def _fill(parameter: Parameter, tensor: OutputTensor, path: str) -> None:
    packed = str(parameter.dtype) == "UInt8"
    if tuple(tensor.shape) != tuple(parameter.shape) or packed != (tensor.dtype == np.uint8):
        raise CheckpointError(
            f"{path}: {tensor.name} is {list(tensor.shape)} of {tensor.dtype}, and the network needs "
            f"{list(parameter.shape)} of {parameter.dtype}. Name the checkpoint of the model that the YAML describes"
            f"{'' if packed == (tensor.dtype == np.uint8) else ', and quantize_base as the checkpoint is'}."
        )
    array = tensor.rows(0, tensor.row_count).reshape(tensor.shape)
    parameter.set_data(to_tensor(array).astype(parameter.dtype))
