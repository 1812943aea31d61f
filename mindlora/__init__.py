"""LoRA for MindSpore, native to MindFormers."""

import importlib
from typing import Any, List

__version__ = "0.2.0"

# Public name -> module, imported at first use, so that `mindlora --help` does not wait for MindSpore.
_HOME = {
    "Adapter": "mindlora.files.adapters.adapter",
    "LoRADense": "mindlora.network.cells.dense",
    "LoraConfig": "mindlora.models.lora_config",
    "LoraError": "mindlora.core.errors",
    "LoraReport": "mindlora.network.apply",
    "apply_lora": "mindlora.network.apply",
    "combine_adapters": "mindlora.files.adapters.combine",
    "compare_adapters": "mindlora.files.adapters.compare",
    "convert_adapter": "mindlora.files.adapters.convert",
    "convert_base": "mindlora.files.base.convert",
    "eva_adapter": "mindlora.network.eva",
    "freeze_base": "mindlora.network.apply",
    "hold_base": "mindlora.network.load_base",
    "initialize_adapters": "mindlora.network.initialize",
    "inspect_adapter": "mindlora.files.adapters.inspect",
    "load_lora": "mindlora.network.save_load",
    "lora_plus_groups": "mindlora.training.step.lora_plus_groups",
    "merge_and_unload": "mindlora.network.merge",
    "merge_checkpoint": "mindlora.files.base.merge",
    "merge_lora": "mindlora.network.merge",
    "quantize_base": "mindlora.network.quantize",
    "quantize_checkpoint": "mindlora.files.base.quantize",
    "resize_adapter": "mindlora.files.adapters.resize",
    "save_lora": "mindlora.network.save_load",
    "trainable_summary": "mindlora.network.apply",
    "unmerge_lora": "mindlora.network.merge",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mindlora' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> List[str]:
    return sorted({*globals(), *_HOME})
