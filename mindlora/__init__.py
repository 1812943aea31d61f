"""LoRA for MindSpore, native to MindFormers."""
import importlib

__version__ = "0.1.0"

# Public name -> module, imported at its first use: so `mindlora --help` does not wait for MindSpore.
_HOME = {
    "Adapter": "mindlora.adapter",
    "LoRADense": "mindlora.nn",
    "LoraConfig": "mindlora.config",
    "LoraError": "mindlora.errors",
    "LoraReport": "mindlora.adapt",
    "apply_lora": "mindlora.adapt",
    "combine_adapters": "mindlora.combine",
    "compare_adapters": "mindlora.inspection",
    "convert_adapter": "mindlora.conversion",
    "convert_base": "mindlora.base.convert",
    "freeze_base": "mindlora.adapt",
    "inspect_adapter": "mindlora.inspection",
    "load_lora": "mindlora.checkpoint",
    "lora_plus_groups": "mindlora.lora_plus",
    "merge_and_unload": "mindlora.merge",
    "merge_checkpoint": "mindlora.base.merge",
    "merge_lora": "mindlora.merge",
    "quantize_base": "mindlora.quantize",
    "quantize_checkpoint": "mindlora.base.quantize",
    "save_lora": "mindlora.checkpoint",
    "start_adapters": "mindlora.residual",
    "trainable_summary": "mindlora.adapt",
    "unmerge_lora": "mindlora.merge",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'mindlora' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted([*globals(), *__all__])
