"""Which model a YAML describes, and where: in model, or in its llm_model if the model is multi-modal."""

import dataclasses
from typing import Any, Dict, Iterable, Iterator, Mapping, Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, dtype_name
from mindlora.core.yaml_file import PET, TRAINING_MODES, value_at
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.description import Description, describe_model, with_experts
from mindlora.models.lora_config import LoraConfig
from mindlora.run.checks.finding import Finding, error, note, warning
from mindlora.run.checks.mcore import family_of, first_class, is_mcore, model_config_of

# Checks of the dtypes in which base and adapter are stored and computed.

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


_NESTED = f"{_MODEL}.llm_model.model_config"
# Where a YAML of a legacy model describes its routed experts.
_EXPERTS = ("moe_config", f"{_MODEL}.moe_config")


def language_model(config: Mapping[str, Any]) -> Tuple[Mapping[str, Any], str]:
    """Returns the YAML with the language model as its model, and the key at which that model's configuration is.

    MindFormers' multi-modal models have a pet_config in model_config.llm_model.
    """
    nested = value_at(config, f"{_MODEL}.llm_model")
    if value_at(config, PET) or not value_at(config, f"{_NESTED}.pet_config"):
        return config, _MODEL
    return {**config, "model": nested}, _NESTED


def at(key: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields findings about a language model, the configuration of which is at ``key``, with the YAML's own keys."""
    for finding in findings:
        if finding.key.startswith(_MODEL):
            finding = dataclasses.replace(finding, key=key + finding.key[len(_MODEL) :])
        yield finding


def model_name(config: Mapping[str, Any]) -> Optional[str]:
    """Returns what a YAML calls its model: the class that MindFormers builds, its configuration's, or model_type."""
    if is_mcore(config) and family_of(config):
        return family_of(config)
    model = value_at(config, _MODEL) or {}
    named = (value_at(config, "model.arch.type"), model.get("type"), first_class(model), model.get("model_type"))
    return next((str(name) for name in named if name), None)


def legacy_experts(config: Mapping[str, Any]) -> int:
    """Returns how many routed experts a layer of a legacy model has; 1 in a dense model."""
    if is_mcore(config):
        return 1
    counts = [value_at(config, f"{key}.expert_num") for key in _EXPERTS]
    return max([1, *(count for count in counts if count in COUNT)])


def architecture_of(config: Mapping[str, Any]) -> Optional[Architecture]:
    """Returns the record of the model's cells, or None where they are not known."""
    name = model_name(config)
    architecture = registry.by_model_type(name) or registry.by_hugging_face_type(str(name))
    unknown_experts = architecture is not None and legacy_experts(config) > 1 and not architecture.experts
    return None if unknown_experts else architecture


def described_network(config: Mapping[str, Any]) -> Optional[Description]:
    """Returns the description of the network that MindFormers builds of a YAML, or None where its cells are not known.

    Raises ConfigError for wrong sizes.
    """
    architecture = architecture_of(config)
    if architecture is not None:
        return network_of(architecture, model_config_of(config))
    others = [value_at(config, f"{key}.{name}") for key in _EXPERTS for name in ("shared_expert_num", "use_gmm")]
    if model_name(config) not in LLAMA.model_types or any(others):
        return None
    return with_experts(network_of(LLAMA, model_config_of(config)), legacy_experts(config))


def network_of(architecture: Architecture, model_config: Dict[str, Any]) -> Description:
    """Returns the description of the network that MindFormers builds of a model; raises ConfigError for wrong sizes."""
    try:
        network = describe_model(architecture, model_config)
    except ConfigError:
        raise
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as failure:
        raise ConfigError(
            f"The sizes in model_config cannot be worked out: {failure}. hidden_size, num_layers, num_heads, "
            "n_kv_heads, vocab_size and intermediate_size must be whole numbers."
        ) from failure
    for parameter in network.parameters.values():
        if not all(size in COUNT for size in parameter.shape):
            raise ConfigError("The sizes in model_config must be whole numbers of at least 1.")
    return network
