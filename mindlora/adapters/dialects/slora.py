"""The folder from which MindFormers' slora serves an adapter: adapter_model.ckpt beside a PEFT-like configuration."""

import math
from typing import Dict

import numpy as np

from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects.mindformers import SLORA, tensor_key
from mindlora.adapters.dialects.peft_config import PeftConfig
from mindlora.common.text import listed
from mindlora.errors import AdapterError, RankMismatchError
from mindlora.numerics.dtypes import from_float32, to_float32
from mindlora.numerics.pair_layouts import LAYOUTS

WEIGHTS_FILE = "adapter_model.ckpt"


def tensors(adapter: Adapter) -> Dict[str, np.ndarray]:
    """Returns the tensors under slora's keys.

    slora multiplies every B by the configuration's single lora_alpha / r, whatever the rank of the pair. A pair whose
    scale differs from that gets the remaining factor multiplied into its B.

    Raises:
        AdapterError: There are saved modules, the adapter is not a plain LoRA, or some cells are not linear: slora
            cannot serve these.
    """
    for layout in LAYOUTS:
        refused = [path for path in adapter.paths if adapter.layout(path) is layout and not layout.in_slora]
        if refused:
            raise AdapterError(
                f"slora does not serve adapters of {layout.cells}: {listed(refused)}. Write format 'peft'."
            )
    variant = adapter.variant
    if not variant.is_plain:
        raise AdapterError(
            f"slora does not serve {variant.tensors} ({variant.field}). Merge the adapter into its base, or write "
            "format 'peft'."
        )
    if adapter.saved_modules:
        raise AdapterError(
            f"slora does not serve saved modules (modules_to_save): {', '.join(adapter.saved_modules)}. Write another "
            "format."
        )
    written, scale = {}, _scale(adapter)
    for path in adapter.paths:
        parts, factor = adapter.parts(path), adapter.scale(path) / scale
        if factor != 1:
            parts["B"] = from_float32(to_float32(parts["B"]) * np.float32(factor), parts["B"].dtype)
        written.update({tensor_key(path, part, SLORA): array for part, array in parts.items()})
    return written


def config(adapter: Adapter) -> Dict:
    """Returns the adapter_config.json that slora takes: module names without paths, an integer lora_alpha.

    Raises:
        AdapterError: lora_alpha is not an integer at the adapter's largest rank.
    """
    rank = max(adapter.rank(path) for path in adapter.paths)
    alpha = _scale(adapter) * rank
    if abs(alpha - round(alpha)) > 1e-9 * alpha:
        raise AdapterError(
            f"slora takes an integer lora_alpha, but at rank {rank} it is {alpha:g} here. Write another format."
        )
    return {
        "base_model_name_or_path": adapter.base_model,
        "bias": "none",
        "lora_alpha": round(alpha),
        "lora_dropout": float(adapter.dropout),
        "peft_type": "LORA",
        "r": rank,
        "use_rslora": False,
        "target_modules": sorted({path.rpartition(".")[2] for path in adapter.paths}),
        "task_type": "CAUSAL_LM",
    }


def check_rank(adapter: Adapter, config: PeftConfig, source: str) -> None:
    """Raises RankMismatchError if r is not the largest rank of the tensors."""
    rank = max(adapter.rank(path) for path in adapter.paths)
    if rank != config.rank:
        raise RankMismatchError(f"{source}: the configuration declares rank {config.rank} and the tensors have {rank}.")


def alphas(adapter: Adapter, config: PeftConfig) -> Dict[str, float]:
    """Returns path -> the lora_alpha that gives the pair slora's one scale."""
    growth = {path: adapter.rank(path) / config.rank for path in adapter.paths}
    return {path: config.alpha * (math.sqrt(growth[path]) if config.use_rslora else growth[path]) for path in growth}


def _scale(adapter: Adapter) -> float:
    """Returns the scale of the pair with the largest rank, whose lora_alpha is most likely an integer."""
    return adapter.scale(max(adapter.paths, key=adapter.rank))
