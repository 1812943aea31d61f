"""PEFT's tuners besides LoRA: converts configurations with their own peft_type to LoRA's fields and back."""

from typing import Callable, Dict, NamedTuple, Optional, Tuple

from mindlora.core.errors import AdapterFormatError
from mindlora.core.text import shown
from mindlora.files.adapters.adapter import Adapter
from mindlora.models.variants.miss import MISS
from mindlora.models.variants.registry import LORA, VARIANTS
from mindlora.models.variants.variant import Variant
from mindlora.models.variants.vera import VERA

# Fields that all tuners have.
_COMMON = (
    *("auto_mapping", "base_model_name_or_path", "bias", "inference_mode", "layers_pattern", "layers_to_transform"),
    *("modules_to_save", "peft_version", "r", "revision", "target_modules", "task_type"),
)


class Tuner(NamedTuple):
    """A peft_type and its variant here.

    Attributes:
        fields (tuple of str): The fields that only it has.
        rank (int): PEFT's default of r.
        dropout (str): Its name for lora_dropout.
        check (callable): Takes the content of adapter_config.json and its path; raises AdapterFormatError for settings
            that are not supported.
        written (callable): Takes LoRA's content and an adapter; returns the fields that not all tuners have.
    """

    variant: Variant
    fields: Tuple[str, ...]
    rank: int
    dropout: str
    check: Callable[[Dict, str], None]
    written: Callable[[Dict, Adapter], Dict]

    def as_lora(self, content: Dict, path: str) -> Dict:
        """Returns its adapter_config.json under LoRA's names, at a scale of 1, after ``check`` has accepted it."""
        self.check(content, path)
        rank = content.get("r", self.rank)
        return {
            **{field: value for field, value in content.items() if field not in (*self.fields, self.dropout)},
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": content.get(self.dropout),
        }

    def of_lora(self, config: Dict, adapter: Adapter) -> Dict:
        """Returns the content of its adapter_config.json, given the content for LoRA."""
        peft_type = next(name for name, tuner in TUNERS.items() if tuner is self)
        common = {field: config[field] for field in _COMMON if field in config}
        return {**common, "peft_type": peft_type, self.dropout: config["lora_dropout"], **self.written(config, adapter)}


def _check_vera(content: Dict, path: str) -> None:
    if content.get("save_projection") is False:
        raise AdapterFormatError(
            f"{path}: save_projection is False, so VeRA's matrices A and B are not in the file. "
            "Save the adapter with save_projection: true."
        )


def _written_of_vera(config: Dict, adapter: Adapter) -> Dict:
    return {
        "fan_in_fan_out": config["fan_in_fan_out"],
        "projection_prng_key": adapter.projection_key,
        "save_projection": True,
    }


def _check_miss(content: Dict, path: str) -> None:
    init_weights = content.get("init_weights", True)
    if not isinstance(init_weights, bool):
        raise AdapterFormatError(
            f"{path}: init_weights is {shown(init_weights)}, which is not supported: 'bat' multiplies the weight by "
            "the blocks of MiSS, and 'mini' repeats them over the outputs. Train with init_weights: true, or merge the "
            "adapter with PEFT (merge_and_unload)."
        )


def _written_of_miss(config: Dict, adapter: Adapter) -> Dict:
    selection = {field: config[field] for field in ("exclude_modules",) if field in config}
    return {**selection, "init_weights": True, "mini_r": 1}


TUNERS = {
    "VERA": Tuner(
        variant=VERA,
        fields=("d_initial", "init_weights", "projection_prng_key", "save_projection"),
        rank=256,
        dropout="vera_dropout",
        check=_check_vera,
        written=_written_of_vera,
    ),
    "MISS": Tuner(
        variant=MISS,
        fields=("init_weights", "mini_r"),
        rank=64,
        dropout="miss_dropout",
        check=_check_miss,
        written=_written_of_miss,
    ),
}
# Variants that are a flag of LoRA in PEFT.
_FLAGGED = tuple(variant for variant in VARIANTS if variant.peft_flag)
_BY_VARIANT = {tuner.variant: tuner for tuner in TUNERS.values()}


def _tuner_of(content: Dict) -> Optional[Tuner]:
    peft_type = content.get("peft_type")
    return TUNERS.get(peft_type) if isinstance(peft_type, str) else None


def variant_of(content: Dict) -> Variant:
    """Returns the variant that an adapter_config.json declares."""
    tuner = _tuner_of(content)
    if tuner:
        return tuner.variant
    return next((variant for variant in _FLAGGED if content.get(variant.peft_flag)), LORA)


def as_lora(content: Dict, path: str) -> Dict:
    """Returns an adapter_config.json of any peft_type under LoRA's names; an unknown type is unchanged."""
    tuner = _tuner_of(content)
    return tuner.as_lora(content, path) if tuner else content


def of_lora(config: Dict, adapter: Adapter) -> Dict:
    """Returns the adapter_config.json of the adapter's variant, given the content for LoRA."""
    tuner = _BY_VARIANT.get(adapter.variant)
    if tuner:
        return tuner.of_lora(config, adapter)
    return {**config, **{variant.peft_flag: adapter.variant is variant for variant in _FLAGGED}}


def projection_key(content: Dict) -> int:
    """Returns the seed of VeRA's A and B, or 0 if the configuration has none."""
    key = content.get("projection_prng_key")
    return key if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < 2**64 else 0
