"""The adapter of a YAML of the PyNative trainer: what lora_config says, and what pet_config adds to it."""

from typing import Any, Dict, Mapping, Sequence, Tuple

from mindlora.core.errors import ConfigError
from mindlora.models.variants.registry import LORA, VARIANTS
from mindlora.models.variants.variant import Variant
from mindlora.run.checks.pet_config import PetLoraConfig

# What both nodes say. MindFormers reads lora_config alone, and writes it beside the checkpoints of adapters.
_SHARED = {"lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0}


def variant_of(pet_config: Mapping[str, Any]) -> Variant:
    """Returns the variant that pet_config asks for."""
    return next((variant for variant in VARIANTS if pet_config.get(variant.field)), LORA)


def merged(
    pet_config: Mapping[str, Any], lora_config: Mapping[str, Any], paths: Sequence[str], dtype: str
) -> Dict[str, Any]:
    """Returns the keys of pet_config with what it does not say, taken from lora_config.

    Args:
        pet_config (mapping): mindlora's node; it may be empty.
        lora_config (mapping): MindFormers' node.
        paths (sequence of str): Of the cells and weights of experts that lora_config selects.
        dtype (str): That of the base's linear cells.
    """
    given = {key: value for key, value in pet_config.items() if value is not None}
    variant = variant_of(given)
    if "preset" not in given:
        for name, theirs in _shared_fields(variant):
            given.setdefault(name, lora_config.get(theirs, _SHARED[theirs]))
        if "target_parameters" in given:
            # It says which weights of the experts it is.
            paths = [path for path in paths if not path.endswith((".weight1", ".weight2"))]
        if paths:
            given.setdefault("target_modules", list(paths))
    given.setdefault("param_init_type", variant.pynative_dtype or dtype)
    return given


def check_agreement(config: PetLoraConfig, lora_config: Mapping[str, Any]) -> None:
    """Raises ConfigError if pet_config, as ``config`` has it, and lora_config contradict each other."""
    for name, theirs in _shared_fields(config.variant):
        other = lora_config.get(theirs, _SHARED[theirs])
        if getattr(config, name) != other:
            raise ConfigError(
                f"pet_config.{name} is {getattr(config, name)!r} and lora_config.{theirs} is {other!r}: MindFormers "
                "saves lora_config with the adapter. Write the same into both, or remove it from pet_config."
            )


def _shared_fields(variant: Variant) -> Sequence[Tuple[str, str]]:
    """Returns (field of pet_config, the same in lora_config) of what both nodes say."""
    fields = {name: name for name in _SHARED if not (name == "lora_alpha" and variant.no_scale)}
    if variant.allocates_ranks:
        fields["init_r"] = fields.pop("lora_rank")
    return tuple(fields.items())
