"""What a pet_config node says beside the fields of LoraConfig: pet types and presets."""

from collections.abc import MutableMapping

from mindlora.core.errors import ConfigError
from mindlora.core.text import suggestion

# Recipes by the size of the fine-tuning data. `learning_rate` is not a field of an adapter:
# mindlora-run puts it into lr_schedule when the YAML names none.
PRESETS = {
    "small_dataset": {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.2, "learning_rate": 1e-4},
    "large_dataset": {"lora_rank": 16, "lora_alpha": 64, "lora_dropout": 0.05, "learning_rate": 1e-4},
}

PET_TYPES = ["lora", "qlora"]


def expand_pet_type(pet_config: MutableMapping) -> None:
    """Expands ``pet_type: qlora`` to what it is short for, in place; any other pet_type is left unchanged."""
    if pet_config.get("pet_type") == "qlora":
        pet_config["pet_type"] = "lora"
        if pet_config.get("quantize_base") is None:
            pet_config["quantize_base"] = "nf4"


def check_pet_type(pet_type: object) -> None:
    """Raises ConfigError unless ``pet_type`` is the one that mindlora handles, ``lora``."""
    if pet_type != "lora":
        raise ConfigError(f"pet_type is {pet_type!r}, which is not known.{suggestion(str(pet_type), PET_TYPES)}")


def preset_fields(preset: str) -> dict:
    """Returns the LoraConfig fields of a named preset; raises ConfigError for a name that is not in PRESETS."""
    if preset not in PRESETS:
        raise ConfigError(f"preset is {preset!r}, which is not known.{suggestion(str(preset), list(PRESETS))}")
    return {key: value for key, value in PRESETS[preset].items() if key != "learning_rate"}
