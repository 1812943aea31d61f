"""Puts an engine together: network, weights, pools, adapter cache, scheduler."""

from typing import Any, Mapping

import numpy as np

from mindlora.config import Patterns
from mindlora.nn.base_fingerprint import fingerprints_of
from mindlora.nn.matching import cell_shapes
from mindlora.numerics.dtypes import BFLOAT16
from mindlora.quantize import quantize_base
from mindlora.serving.adapter_memory import AdapterMemory
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.adapter_slots import AdapterSlots
from mindlora.serving.blocks import BlockPool
from mindlora.serving.engine import Engine
from mindlora.serving.network import add_pools, build_network, linear_cells
from mindlora.serving.packed_adapter import ServedLayout, prepare
from mindlora.serving.runner import ModelRunner
from mindlora.serving.scheduler import Scheduler
from mindlora.serving.settings import EngineSettings
from mindlora.serving.stopping import end_tokens
from mindlora.serving.weights import load_base

_NUMPY = {"Float32": np.dtype("<f4"), "Float16": np.dtype("<f2"), "BFloat16": BFLOAT16}


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

    Args:
        model (mapping): The node ``model`` of a YAML.
        checkpoint (str): The base's weights: see mindlora.serving.weights.load_base.
        tokenizer: As mindlora.data.tokenizers.load_tokenizer returns it.
        registry (AdapterRegistry): The adapters.
        settings (EngineSettings): Sizes.
        quantize (bool): Whether the checkpoint is quantized (quantize_base: nf4). Default: False.
        quantize_exclude (str or list of str): As it was when it was quantized. Default: None.
        model_name (str): What callers name the base. Default: "base".

    Returns:
        Engine.

    Raises:
        ConfigError, CheckpointError: The model cannot be built or its weights cannot be loaded.
    """
    network = build_network(model, settings)
    if quantize:
        quantize_base(network, quantize_exclude)
    load_base(network, checkpoint)
    cells = linear_cells(network)
    # From the base's own cells, before the pools take their places.
    shapes, fingerprint = cell_shapes(network, cells), fingerprints_of(cells)
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
