"""The variants, one line each, and the variant of a configuration or an adapter."""

from typing import Dict, Iterable, Tuple

from mindlora.core.errors import ConfigError
from mindlora.models.variants.adalora import ADALORA
from mindlora.models.variants.dora import DORA
from mindlora.models.variants.miss import MISS
from mindlora.models.variants.variant import A, B, PartKey, Settings, Variant
from mindlora.models.variants.vera import VERA

LORA = Variant()
# The variants that a field of LoraConfig selects.
VARIANTS: Tuple[Variant, ...] = (DORA, VERA, ADALORA, MISS)
# The variants whose parts are in files.
STORED = tuple(variant for variant in VARIANTS if variant.in_files)

_PARTS = (A, B, *(part for variant in VARIANTS for part in variant.parts))
_STORED_PARTS = (A, B, *(part for variant in STORED for part in variant.parts))
# Part -> the name of its parameter in a cell.
PARAMETERS = {part.name: part.parameter for part in _PARTS}
PYNATIVE_PARAMETERS = {part.name: part.pynative for part in _PARTS}
# A PyNative model keeps its initial pairs too, as MindFormers' checkpoints have its base after the change.
PYNATIVE_INITIAL = {"A": "initial_lora_a", "B": "initial_lora_b"}
# Names in a PyNative model with several adapters, where one parameter holds a part of all of them.
PYNATIVE_STACKED = {"A": "stacked_lora_a", "B": "stacked_lora_b"}
# Ends of the names of parameters that checkpoints of MindSpore and MindFormers hold and adapter files do not.
IN_CHECKPOINTS_ALONE = tuple(
    name for part in _PARTS if part not in _STORED_PARTS for name in (part.parameter, part.pynative)
)
# All parts of a cell that a file can hold, in the file's order.
PARTS = {part.name: part for part in _STORED_PARTS}
SHARED_PARTS = {part.name: part for variant in VARIANTS for part in variant.shared_parts.values()}
# "A" or "B" -> key of the shared projection, which belongs to no single cell, so its path is empty.
SHARED: Dict[str, PartKey] = {
    half: ("", part.name) for variant in VARIANTS for half, part in variant.shared_parts.items()
}


def of_config(config: Settings) -> Variant:
    """Returns the variant that a configuration asks for; raises ConfigError if it asks for two."""
    chosen = [variant for variant in VARIANTS if getattr(config, variant.field)]
    if len(chosen) > 1:
        first, second = chosen[:2]
        raise ConfigError(
            f"{second.field} is True and {first.field} is True, which {second.name} does not have. "
            "Leave one of them out."
        )
    return chosen[0] if chosen else LORA


def of_parts(parts: Iterable[str]) -> Variant:
    """Returns the variant of an adapter in a file that has these parts."""
    names = set(parts)
    return next((variant for variant in STORED if variant.has_any(names)), LORA)
