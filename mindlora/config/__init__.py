"""LoraConfig: one validated description of an adapter; presets; what pet_config says beside it."""

from mindlora.config.lora_config import QUANTIZATIONS, LoraConfig, Patterns
from mindlora.config.pet_keys import PET_TYPES, PRESETS, check_pet_type, expand_pet_type, preset_fields

__all__ = [
    "PET_TYPES",
    "PRESETS",
    "QUANTIZATIONS",
    "LoraConfig",
    "Patterns",
    "check_pet_type",
    "expand_pet_type",
    "preset_fields",
]
