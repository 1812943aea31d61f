"""The folder that MindFormers' slora serves an adapter from: adapter_model.ckpt beside a PEFT-like configuration."""

import math
from typing import Dict

import numpy as np

from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects.mindformers import SLORA, tensor_key
from mindlora.adapters.dialects.peft_config import PeftConfig
from mindlora.errors import AdapterError, RankMismatchError
from mindlora.numerics.dtypes import from_float32, to_float32

WEIGHTS_FILE = "adapter_model.ckpt"


def tensors(adapter: Adapter) -> Dict[str, np.ndarray]:
    """Returns the tensors under slora's keys.

    slora multiplies every B by the one lora_alpha / r of the configuration, whatever the rank of a pair; where the
    scales differ, the rest of each goes into its B.

    Raises:
        AdapterError: Modules were trained whole, the adapter is DoRA's, or cells are not linear: slora has no place for
            them.
    """
    other = [path for path in adapter.paths if path in adapter.embeddings or adapter.tensors[path, "A"].ndim > 2]
    if other:
        raise AdapterError(
            f"slora has no place for adapters of embeddings and convolutions: {', '.join(other)}. Write format 'peft'."
        )
    for field in ("use_dora", "use_vera"):
        if getattr(adapter, field):
            raise AdapterError(
                f"slora has no place for the vectors that {field} trains. Merge the adapter into its "
                "base, or write format 'peft'."
            )
    if adapter.saved_modules:
        raise AdapterError(
            f"slora has no place for modules that were trained whole: {', '.join(adapter.saved_modules)}."
        )
    written, scale = {}, _scale(adapter)
    for (path, half), array in adapter.tensors.items():
        factor = adapter.scale(path) / scale
        if half == "B" and factor != 1:
            array = from_float32(to_float32(array) * np.float32(factor), array.dtype)
        written[tensor_key(path, half, SLORA)] = array
    return written


def config(adapter: Adapter) -> Dict:
    """Returns the adapter_config.json that slora takes: a list of bare cell names, a whole lora_alpha, a float dropout.

    Raises:
        AdapterError: lora_alpha is no whole number at the adapter's largest rank.
    """
    rank = max(adapter.rank(path) for path in adapter.paths)
    alpha = _scale(adapter) * rank
    if abs(alpha - round(alpha)) > 1e-9 * alpha:
        raise AdapterError(f"slora takes a whole lora_alpha, and at rank {rank} this adapter's is {alpha:g}.")
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
    """Raises RankMismatchError where r is not the largest rank that the tensors have."""
    rank = max(adapter.rank(path) for path in adapter.paths)
    if rank != config.rank:
        raise RankMismatchError(f"{source}: the configuration declares rank {config.rank} and the tensors have {rank}.")


def alphas(adapter: Adapter, config: PeftConfig) -> Dict[str, float]:
    """Returns lora_alpha for each pair, so that the scale of all of them is the one that slora takes."""
    growth = {path: adapter.rank(path) / config.rank for path in adapter.paths}
    return {path: config.alpha * (math.sqrt(growth[path]) if config.use_rslora else growth[path]) for path in growth}


def _scale(adapter) -> float:
    """The scale of the pair with the largest rank, where lora_alpha is most likely a whole number."""
    return adapter.scale(max(adapter.paths, key=adapter.rank))
