"""Whether mindlora can serve the model of a YAML on the YAML's device: one rule, which serving and the doctor ask."""

from typing import Any, Dict, Iterator, Mapping

from mindlora.core.fields import COUNT, dtype_name
from mindlora.core.yaml_file import value_at
from mindlora.run.checks.cpu import check_cpu_serving
from mindlora.run.checks.finding import Finding, error, note
from mindlora.run.checks.mcore import HEAD_MULTIPLE, check_served, is_mcore

_MODEL = "model.model_config"
# What MindFormers' LlamaConfig has where a YAML says nothing.
_DEFAULTS: Dict[str, Any] = {"compute_dtype": "float16", "hidden_size": 4096, "num_heads": 32}


def base_name(config: Mapping[str, Any]) -> str:
    """Returns what callers of a server name the base of a YAML, unless they are told otherwise."""
    return value_at(config, "trainer.model_name") or "base"


def check_serving(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each reason why the model of a YAML cannot be served on its device; no file is read.

    ``config`` must have model.model_config.
    """
    if is_mcore(config):
        yield from check_served(config)
    elif value_at(config, "context.device_target") == "CPU":
        yield from check_cpu_serving(value_at(config, _MODEL))
    else:
        yield from _check_paged_attention(value_at(config, _MODEL))


def notes_on_serving(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields a note for each reason why what a YAML for Ascend trains cannot be served there.

    Legacy models that are not of MindFormers' LlamaConfig, and mcore models, are not looked at: docs/serving.md has
    those that are served.
    """
    model_config = value_at(config, _MODEL) or {}
    if value_at(config, "context.device_target") == "CPU" or model_config.get("type") != "LlamaConfig":
        return
    for finding in _check_paged_attention(model_config):
        yield note(finding.key, f"mindlora cannot serve this model on Ascend: {finding.found}", finding.advice)


def _check_paged_attention(model_config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for what MindFormers' paged attention on Ascend does not take."""
    computed, hidden, heads = (model_config.get(key) or default for key, default in _DEFAULTS.items())
    if dtype_name(computed, "compute_dtype") == "float32":
        yield error(
            f"{_MODEL}.compute_dtype",
            "compute_dtype is float32, and on Ascend MindFormers' paged attention computes in 16 bits alone.",
            f"Set --{_MODEL}.compute_dtype bfloat16, or serve it on a CPU (--device_target CPU).",
        )
    size = hidden // heads if hidden in COUNT and heads in COUNT else HEAD_MULTIPLE
    if size % HEAD_MULTIPLE:
        yield error(
            f"{_MODEL}.num_heads",
            f"hidden_size {hidden} and num_heads {heads} make heads of {size} numbers, and on Ascend MindFormers' "
            f"attention takes multiples of {HEAD_MULTIPLE}.",
            "Serve it on a CPU (--device_target CPU).",
        )
