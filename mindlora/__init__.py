"""LoRA for MindSpore, native to MindFormers."""
from mindlora.adapt import LoraReport, apply_lora, freeze_base, trainable_summary
from mindlora.checkpoint import load_lora, save_lora
from mindlora.config import LoraConfig
from mindlora.errors import LoraError
from mindlora.nn import LoRADense

__version__ = "0.1.0"
__all__ = ["LoRADense", "LoraConfig", "LoraError", "LoraReport", "apply_lora", "freeze_base", "load_lora",
           "save_lora", "trainable_summary"]
