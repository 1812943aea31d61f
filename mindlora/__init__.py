"""LoRA for MindSpore, native to MindFormers."""
import importlib

__version__ = "0.1.0"

# Public name -> module, imported at its first use: so `mindlora --help` does not wait for MindSpore.
_HOME = {
    "LoRADense": "mindlora.nn",
    "LoraConfig": "mindlora.config",
    "LoraError": "mindlora.errors",
    "LoraReport": "mindlora.adapt",
    "apply_lora": "mindlora.adapt",
    "freeze_base": "mindlora.adapt",
    "load_lora": "mindlora.checkpoint",
    "save_lora": "mindlora.checkpoint",
    "trainable_summary": "mindlora.adapt",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'mindlora' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted([*globals(), *__all__])
