"""The folder from which MindFormers' slora serves an adapter: adapter_model.ckpt beside a PEFT-like configuration."""

import os
from typing import Dict

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import AdapterError
from mindlora.core.formats import ckpt_file
from mindlora.core.json_files import write_json
from mindlora.core.numerics.dtypes import scaled
from mindlora.core.numerics.pair_shapes import LAYOUTS
from mindlora.core.text import listed
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects.mindformers import SLORA, MindFormers, tensor_key
from mindlora.files.adapters.dialects.peft import CONFIG_FILE
from mindlora.models.architectures import architecture

WEIGHTS_FILE = "adapter_model.ckpt"


class Slora(MindFormers):
    """The folder of one adapter."""

    form = "slora"
    world = architecture.LEGACY
    weights = (WEIGHTS_FILE,)

    def __init__(self) -> None:
        super().__init__(SLORA)

    def write(self, adapter: Adapter, path: str) -> None:
        self.refuse_single_experts(adapter)
        with atomic.replace_folder(path) as folder:
            ckpt_file.write(os.path.join(folder, WEIGHTS_FILE), tensors(adapter), "{}")
            write_json(os.path.join(folder, CONFIG_FILE), config(adapter))


def tensors(adapter: Adapter) -> Dict[str, np.ndarray]:
    """Returns the tensors under slora's keys; raises AdapterError for parts that slora cannot serve.

    slora multiplies every B by the configuration's single lora_alpha / r, whatever the rank of the pair. A pair whose
    scale differs from that gets the remaining factor multiplied into its B.
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
    if adapter.trained_modules:
        raise AdapterError(
            f"slora does not serve saved modules (modules_to_save): {', '.join(adapter.trained_modules)}. Write "
            "another format."
        )
    written = {}
    scale = _scale(adapter)
    for path in adapter.paths:
        parts = adapter.parts(path)
        parts["B"] = scaled(parts["B"], adapter.scale(path) / scale)
        for part, array in parts.items():
            written[tensor_key(path, part, SLORA)] = array
    return written


def config(adapter: Adapter) -> Dict:
    """Returns slora's adapter_config.json: module names without paths, and lora_alpha, which must be an integer."""
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


def _scale(adapter: Adapter) -> float:
    """Returns the scale of the pair with the largest rank, whose lora_alpha is most likely an integer."""
    return adapter.scale(max(adapter.paths, key=adapter.rank))
