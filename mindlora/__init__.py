"""LoRA for MindSpore, native to MindFormers."""

import importlib
from typing import Any, List

__version__ = "0.1.0"

# Public name -> module, imported at first use, so that `mindlora --help` does not wait for MindSpore.
_HOME = {
    "Adapter": "mindlora.adapters.adapter",
    "LoRADense": "mindlora.nn",
    "LoraConfig": "mindlora.config",
    "LoraError": "mindlora.errors",
    "LoraReport": "mindlora.apply",
    "apply_lora": "mindlora.apply",
    "combine_adapters": "mindlora.adapters.combine",
    "compare_adapters": "mindlora.adapters.compare",
    "convert_adapter": "mindlora.adapters.convert",
    "convert_base": "mindlora.base.convert",
    "eva_adapter": "mindlora.eva",
    "freeze_base": "mindlora.apply",
    "initialize_adapters": "mindlora.initialize",
    "inspect_adapter": "mindlora.adapters.inspect",
    "load_lora": "mindlora.save_load",
    "lora_plus_groups": "mindlora.training.lora_plus",
    "merge_and_unload": "mindlora.merge",
    "merge_checkpoint": "mindlora.base.merge",
    "merge_lora": "mindlora.merge",
    "quantize_base": "mindlora.quantize",
    "quantize_checkpoint": "mindlora.base.quantize",
    "resize_adapter": "mindlora.adapters.resize",
    "save_lora": "mindlora.save_load",
    "trainable_summary": "mindlora.apply",
    "unmerge_lora": "mindlora.merge",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mindlora' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> List[str]:
    return sorted({*globals(), *_HOME})
