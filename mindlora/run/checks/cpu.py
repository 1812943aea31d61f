"""What a MindFormers YAML must set to run on a CPU, where some of MindFormers' kernels do not exist."""

from typing import Any, Dict, Iterator, Mapping, Sequence

from mindlora.core.run_modes import TRAINING_MODES
from mindlora.core.yaml_file import value_at
from mindlora.run.checks.base_loading import loads_by_tensor
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.mcore import is_mcore
from mindlora.run.checks.training import train_step

_KEY = "context.device_target"
# What MindFormers' Llama needs on a CPU: key -> (value, reason).
_MODEL = {
    "use_flash_attention": (False, "flash attention has no CPU kernel"),
    "fused_rms_norm": (False, "the fused RmsNorm has no CPU kernel"),
    "use_rope_slice": (True, "the other rotary embedding needs a broadcast that CPU kernels do not support"),
    "use_past": (False, "paged attention has no CPU kernel"),
}
_COMPUTED = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")
_DTYPES = (*_COMPUTED, "param_init_type")
_FLOAT32 = ("float32", "fp32")
_LLAMA_DEFAULTS = {
    "use_flash_attention": False,
    "fused_rms_norm": True,
    "use_rope_slice": False,
    "use_past": False,
    "compute_dtype": "float16",
    "layernorm_compute_type": "float32",
    "softmax_compute_type": "float32",
    "rotary_dtype": "float32",
    "param_init_type": "float16",
}


def cpu_keys() -> Dict[str, Any]:
    """Returns the keys of model_config, with their values, that MindFormers' Llama needs on a CPU."""
    return {**dict.fromkeys(_DTYPES, "float32"), **{key: needed for key, (needed, _) in _MODEL.items()}}


def check_cpu(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error with everything that must be set differently, unless a YAML for a CPU can run there."""
    if value_at(config, _KEY) != "CPU" or is_mcore(config):
        return
    model_config = value_at(config, "model.model_config")
    changes = [*_model_changes(model_config), *_prediction_changes(config), *_run_changes(config)]
    if changes:
        yield error(_KEY, f"{_KEY} is CPU, where this YAML cannot run.", f"Set: {'; '.join(changes)}.")


def check_cpu_serving(model_config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error with everything that must be set differently, unless the model can be served on a CPU."""
    changes = list(_model_changes(model_config, ("fused_rms_norm",), _COMPUTED))
    # Linear cells take weights of 16 bits as they are; the lookup of an embedding does not.
    weights = model_config.get("param_init_type", _LLAMA_DEFAULTS["param_init_type"])
    embedding = model_config.get("embedding_init_type") or weights
    if embedding not in _FLOAT32:
        changes.append(f"model.model_config.embedding_init_type: float32 (found {embedding})")
    if changes:
        yield error(_KEY, f"{_KEY} is CPU, where this model cannot be served.", f"Set: {'; '.join(changes)}.")


def _model_changes(
    model_config: Mapping[str, Any], keys: Sequence[str] = tuple(_MODEL), dtypes: Sequence[str] = _DTYPES
) -> Iterator[str]:
    for key in keys:
        needed, reason = _MODEL[key]
        if bool(model_config.get(key, _LLAMA_DEFAULTS[key])) != needed:
            yield f"model.model_config.{key}: {needed} ({reason})"
    for key in dtypes:
        dtype = model_config.get(key, _LLAMA_DEFAULTS[key])
        if dtype not in _FLOAT32:
            yield f"model.model_config.{key}: float32 (found {dtype})"


def _prediction_changes(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("run_mode") != "predict":
        return
    # MindSpore chooses the next token with ArgMaxExt or TopkExt, which have no CPU kernel.
    if not value_at(config, "model.model_config").get("do_sample", True):
        yield (
            "model.model_config.do_sample: True (greedy search has no CPU kernel; sampling with top_k: 1 chooses the "
            "same tokens)"
        )
    if not config.get("postprocess_use_numpy"):
        yield "postprocess_use_numpy: True (sampling without NumPy has no CPU kernel either)"


def _run_changes(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("use_parallel") and config.get("load_checkpoint") and not loads_by_tensor(config):
        yield (
            "use_parallel: False (with several devices and load_checkpoint, MindFormers waits at a Barrier, which has "
            "no CPU kernel)"
        )
    if config.get("run_mode") in TRAINING_MODES and train_step(config) == "MFTrainOneStepCell":
        yield (
            "runner_wrapper.type: LoraTrainOneStepCell (MFTrainOneStepCell checks overflow with kernels that only "
            "Ascend has)"
        )
