"""The model of a YAML: its dtypes, and the description of its network."""

from typing import Any, Dict, Iterator, Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, dtype_name
from mindlora.core.yaml_file import PET
from mindlora.models.architectures.architecture import Architecture
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.description import Description, describe_model, with_experts
from mindlora.models.lora_config import LoraConfig
from mindlora.run.checks.finding import Finding, error, note, warning
from mindlora.run.keys import MODEL
from mindlora.run.yaml_run import EXPERT_NODES, YamlRun

# Checks of the dtypes in which base and adapter are stored and computed.

_PRECISION = {"float16": 11, "bfloat16": 8}


def check_dtypes(run: YamlRun, lora: LoraConfig) -> Iterator[Finding]:
    """Yields a finding for each loss by rounding, underflow or overflow in the YAML's dtypes."""
    dtypes = []
    keys = _base_dtype_keys(run)
    for key, default in keys:
        try:
            dtypes.append(dtype_name(run.model_config.get(key) or default, key))
        except ConfigError as refusal:
            yield error(f"{MODEL}.{key}", str(refusal))
            return
    stored, computed = dtypes
    if run.trains:
        yield from _check_training(run, lora, computed)
    yield from _check_base(stored, computed, keys[0][0])
    if lora.compute_dtype == "float16" != computed:
        yield warning(
            f"{PET}.compute_dtype",
            f"LoRA computes in float16 on activations in {computed}: values above 65504 become infinite.",
            f"Remove compute_dtype: LoRA then computes in {computed}.",
        )


def _check_training(run: YamlRun, lora, computed) -> Iterator[Finding]:
    if lora.param_init_type != "float32":
        bits = _PRECISION[lora.param_init_type]
        yield warning(
            f"{PET}.param_init_type",
            f"A and B are stored in {lora.param_init_type}, with a precision of {bits} bits: an optimizer step below "
            f"1/{2**bits} of a weight is rounded away.",
            "Use float32: A and B are small.",
        )
    scale = run.at("runner_wrapper.scale_sense")
    scales_loss = isinstance(scale, dict) or isinstance(scale, (int, float)) and scale > 1
    if "float16" in (computed, lora.compute_dtype, lora.param_init_type) and not scales_loss:
        yield warning(
            "runner_wrapper.scale_sense",
            "Gradients are computed in float16 and the loss is not scaled: small gradients become zero.",
            "Set scale_sense to type: DynamicLossScaleUpdateCell, or compute in bfloat16.",
        )


def _check_base(stored, computed, stored_key) -> Iterator[Finding]:
    if (stored, computed) == ("bfloat16", "float16"):
        yield warning(
            f"{MODEL}.compute_dtype",
            "The base is stored in bfloat16 and computed in float16: values above 65504, which bfloat16 can hold, "
            "become infinite.",
            "Compute in bfloat16.",
        )
    if (stored, computed) == ("float16", "bfloat16"):
        yield note(
            f"{MODEL}.{stored_key}",
            "The base is stored in float16, and every product rounds it to bfloat16.",
            "Store it in bfloat16: the products are the same, without the cast.",
        )


def _base_dtype_keys(run: YamlRun) -> Tuple[Tuple[str, str], Tuple[str, str]]:
    """Returns (key, default) of the dtypes in which the base is stored and computed."""
    if not run.is_mcore:
        return ("param_init_type", "float16"), ("compute_dtype", "float16")
    stored = "param_init_type" if run.model_config.get("param_init_type") else "params_dtype"
    return (stored, "float32"), ("compute_dtype", "bfloat16")


def described_network(run: YamlRun) -> Optional[Description]:
    """Returns the description of the network that MindFormers builds from a YAML, or None if its cells are unknown.

    Raises ConfigError for wrong sizes.
    """
    if run.architecture is not None:
        return network_of(run.architecture, run.model)
    others = [run.at(f"{key}.{name}") for key in EXPERT_NODES for name in ("shared_expert_num", "use_gmm")]
    if run.model_name not in LLAMA.model_types or any(others):
        return None
    return with_experts(network_of(LLAMA, run.model), run.legacy_experts)


def network_of(architecture: Architecture, model_config: Dict[str, Any]) -> Description:
    """Returns the description of MindFormers' network for a model; raises ConfigError for wrong sizes."""
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
