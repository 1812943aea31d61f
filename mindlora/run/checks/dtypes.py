"""Checks of the dtypes in which base and adapter are stored and computed."""

from typing import Any, Iterator, Mapping, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import dtype_name
from mindlora.core.run_modes import TRAINING_MODES
from mindlora.core.yaml_file import PET, value_at
from mindlora.models.lora_config import LoraConfig
from mindlora.run.checks.finding import Finding, error, note, warning
from mindlora.run.checks.mcore import is_mcore

_PRECISION = {"float16": 11, "bfloat16": 8}
_MODEL = "model.model_config"


def check_dtypes(config: Mapping[str, Any], lora: LoraConfig) -> Iterator[Finding]:
    """Yields a finding for what rounding, underflow or overflow would cost in the dtypes that the YAML names."""
    dtypes = []
    keys = _base_dtype_keys(config)
    for key, default in keys:
        try:
            dtypes.append(dtype_name(value_at(config, f"{_MODEL}.{key}") or default, key))
        except ConfigError as refusal:
            yield error(f"{_MODEL}.{key}", str(refusal))
            return
    stored, computed = dtypes
    if config.get("run_mode") in TRAINING_MODES:
        yield from _check_training(config, lora, computed)
    yield from _check_base(stored, computed, keys[0][0])
    if lora.compute_dtype == "float16" != computed:
        yield warning(
            f"{PET}.compute_dtype",
            f"LoRA computes in float16 on activations in {computed}: values above 65504 become infinite.",
            f"Remove compute_dtype: LoRA then computes in {computed}.",
        )


def _check_training(config, lora, computed) -> Iterator[Finding]:
    if lora.param_init_type != "float32":
        bits = _PRECISION[lora.param_init_type]
        yield warning(
            f"{PET}.param_init_type",
            f"A and B are stored in {lora.param_init_type}, with a precision of {bits} bits: an optimizer step below "
            f"1/{2**bits} of a weight is rounded away.",
            "Use float32: A and B are small.",
        )
    if "float16" in (computed, lora.compute_dtype, lora.param_init_type) and not _scales_loss(config):
        yield warning(
            "runner_wrapper.scale_sense",
            "Gradients are computed in float16 and the loss is not scaled: small gradients become zero.",
            "Set scale_sense to type: DynamicLossScaleUpdateCell, or compute in bfloat16.",
        )


def _check_base(stored, computed, stored_key) -> Iterator[Finding]:
    if (stored, computed) == ("bfloat16", "float16"):
        yield warning(
            f"{_MODEL}.compute_dtype",
            "The base is stored in bfloat16 and computed in float16: values above 65504, which bfloat16 can hold, "
            "become infinite.",
            "Compute in bfloat16.",
        )
    if (stored, computed) == ("float16", "bfloat16"):
        yield note(
            f"{_MODEL}.{stored_key}",
            "The base is stored in float16, and every product rounds it to bfloat16.",
            "Store it in bfloat16: the products are the same, without the cast.",
        )


def _scales_loss(config) -> bool:
    scale = value_at(config, "runner_wrapper.scale_sense")
    return isinstance(scale, dict) or isinstance(scale, (int, float)) and scale > 1


def _base_dtype_keys(config: Mapping[str, Any]) -> Tuple[Tuple[str, str], Tuple[str, str]]:
    """Returns (key, default) of the dtypes in which the base is stored and computed."""
    if not is_mcore(config):
        return ("param_init_type", "float16"), ("compute_dtype", "float16")
    stored = "param_init_type" if value_at(config, f"{_MODEL}.param_init_type") else "params_dtype"
    return (stored, "float32"), ("compute_dtype", "bfloat16")
