"""PEFT's VeRA: an adapter_config.json with other names for some of LoRA's fields."""

from typing import Dict

from mindlora.errors import AdapterFormatError

KIND = "VERA"
_VERA_FIELDS = ("d_initial", "fan_in_fan_out", "init_weights", "projection_prng_key", "save_projection", "vera_dropout")

_RANK = 256  # PEFT's default.


def as_lora(content: Dict, path: str) -> Dict:
    """Returns the content of a VeRA adapter_config.json under LoRA's names, at a scale of 1.

    Raises:
        AdapterFormatError: A and B were not saved.
    """
    if content.get("save_projection") is False:
        raise AdapterFormatError(
            f"{path}: save_projection is False, so VeRA's matrices A and B are not in the file. "
            "Save the adapter with save_projection: true."
        )
    renamed = {field: value for field, value in content.items() if field not in _VERA_FIELDS}
    return {
        **renamed,
        "peft_type": "LORA",
        "r": content.get("r", _RANK),
        "lora_alpha": content.get("r", _RANK),
        "lora_dropout": content.get("vera_dropout"),
        "fan_in_fan_out": content.get("fan_in_fan_out"),
    }


def projection_key(content: Dict) -> int:
    """Returns the seed that A and B were drawn from, or 0 if the configuration does not say."""
    key = content.get("projection_prng_key")
    return key if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < 2**64 else 0


def of_lora(config: Dict, projection_prng_key: int) -> Dict:
    """Returns the content of a VeRA adapter_config.json, given the content that a LoRA's would have."""
    shared = (
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "modules_to_save",
        "peft_version",
        "r",
        "revision",
        "target_modules",
        "task_type",
    )
    return {
        **{field: config[field] for field in shared if field in config},
        "peft_type": KIND,
        "projection_prng_key": projection_prng_key,
        "save_projection": True,
        "vera_dropout": config["lora_dropout"],
    }
