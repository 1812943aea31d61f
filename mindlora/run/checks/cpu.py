"""The settings that a MindFormers YAML needs on a CPU, and the runs whose frozen base can stay in 16 bits there.

Some of MindFormers' kernels do not exist on a CPU.
"""

from typing import Any, Dict, Iterator, Mapping, Optional, Sequence

from mindlora.core.fields import COUNT, dtype_name
from mindlora.run.checks.base_weights import loads_by_tensor
from mindlora.run.checks.finding import Finding, error, note
from mindlora.run.checks.mcore import HEAD_MULTIPLE, check_served
from mindlora.run.keys import MODEL
from mindlora.run.yaml_run import YamlRun

_KEY = "context.device_target"
# Settings that MindFormers' Llama needs on a CPU: key -> (value, reason).
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
# Settings that MindFormers' mcore models need there, besides dtypes: key -> (value, which is the default, and reason).
_MCORE = {
    "attention_dropout": (0.0, "dropout of attention weights has no CPU kernel"),
    "apply_rope_fusion": (False, "the fused rotary embedding has no CPU kernel"),
    "use_attn_mask_compression": (False, "a compressed mask has no CPU kernel"),
    "use_eod_attn_mask_compression": (False, "a compressed mask has no CPU kernel"),
    "moe_permute_fusion": (False, "the fused permutation has no CPU kernel"),
    "print_expert_load": (False, "on a CPU the tokens of an expert are not counted"),
    "experimental_attention_variant": (None, "sparse attention has no CPU kernel"),
    "window_size": (None, "a sliding window has no CPU kernel"),
}
# The default compute dtype of mcore models.
_MCORE_DTYPES = {
    **dict.fromkeys(("layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype"), "float32"),
    "compute_dtype": "bfloat16",
}
_PRODUCTS = "pet_config.product_dtype"
_NARROW = ("float16", "bfloat16")


def cpu_keys() -> Dict[str, Any]:
    """Returns the keys of model_config, with their values, that MindFormers' Llama needs on a CPU."""
    return {**dict.fromkeys(_DTYPES, "float32"), **{key: needed for key, (needed, _) in _MODEL.items()}}


def check_cpu(run: YamlRun) -> Iterator[Finding]:
    """Yields an error with all settings to change, unless a YAML for a CPU can run there."""
    if not run.on_cpu:
        return
    if run.is_mcore:
        changes = [*_mcore_changes(run), *_run_changes(run)]
    else:
        changes = [*_model_changes(run.model_config), *_weight_changes(run)]
        changes += [*_prediction_changes(run), *_run_changes(run)]
    if changes:
        yield error(_KEY, f"{_KEY} is CPU, where this YAML cannot run.", f"Set: {'; '.join(changes)}.")


def check_cpu_serving(model_config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error with all settings to change, unless the model can be served on a CPU."""
    # Linear cells and embeddings take 16-bit weights directly.
    changes = list(_model_changes(model_config, ("fused_rms_norm",)))
    if changes:
        yield error(_KEY, f"{_KEY} is CPU, where this model cannot be served.", f"Set: {'; '.join(changes)}.")


def _model_changes(model_config: Mapping[str, Any], keys: Sequence[str] = tuple(_MODEL)) -> Iterator[str]:
    for key in keys:
        needed, reason = _MODEL[key]
        if bool(model_config.get(key, _LLAMA_DEFAULTS[key])) != needed:
            yield f"model.model_config.{key}: {needed} ({reason})"
    for key in _COMPUTED:
        dtype = model_config.get(key, _LLAMA_DEFAULTS[key])
        if dtype not in _FLOAT32:
            yield f"model.model_config.{key}: float32 (found {dtype})"


def _weight_changes(run: YamlRun) -> Iterator[str]:
    """Yields dtypes of weights to change: to float32, or to 16 bits if they are frozen and the run can hold them."""
    if held_dtype(run) is not None:
        return
    defaults = {} if run.is_mcore else {"param_init_type": _LLAMA_DEFAULTS["param_init_type"]}
    for key in (dtype_key(run), *(() if run.is_mcore else ("embedding_init_type",))):
        dtype = run.model.get(key) or defaults.get(key, "float32")
        if dtype not in _FLOAT32:
            reason = why_not_held(run)
            yield f"model.model_config.{key}: float32 (found {dtype}{': ' + reason if reason else ''})"


def _mcore_changes(run: YamlRun) -> Iterator[str]:
    if run.mode == "eval" and not run.model.get("pet_config"):
        yield "model.model_config.pet_config (without it, mcore models get cells for a CPU in training only)"
    for key, (needed, reason) in _MCORE.items():
        found = run.model.get(key)
        if (found or needed) != needed:
            yield f"model.model_config.{key}: {'null' if needed is None else needed} ({reason})"
    for key, default in _MCORE_DTYPES.items():
        dtype = run.model.get(key) or default
        if dtype not in _FLOAT32:
            yield f"model.model_config.{key}: float32 (found {dtype})"
    yield from _weight_changes(run)
    if run.at("use_parallel") and run.at("parallel.parallel_mode") not in (0, "data_parallel"):
        yield "parallel.parallel_mode: 0 (CPU processes divide data alone)"


def _prediction_changes(run: YamlRun) -> Iterator[str]:
    if run.mode != "predict":
        return
    # MindSpore chooses the next token with ArgMaxExt or TopkExt, which have no CPU kernel.
    if not run.model_config.get("do_sample", True):
        yield (
            "model.model_config.do_sample: True (greedy search has no CPU kernel; sampling with top_k: 1 chooses the "
            "same tokens)"
        )
    if not run.at("postprocess_use_numpy"):
        yield "postprocess_use_numpy: True (sampling without NumPy has no CPU kernel either)"


def _run_changes(run: YamlRun) -> Iterator[str]:
    if run.in_parallel and run.at("load_checkpoint") and not loads_by_tensor(run):
        yield (
            "use_parallel: False (with several devices and load_checkpoint, MindFormers waits at a Barrier, which has "
            "no CPU kernel)"
        )
    if run.trains and run.train_step == "MFTrainOneStepCell":
        yield (
            "runner_wrapper.type: LoraTrainOneStepCell (MFTrainOneStepCell checks overflow with kernels that only "
            "Ascend has)"
        )


# Whether mindlora can serve the model of a YAML on the YAML's device: one rule for serving and the doctor.

_MODEL_CONFIG = "model.model_config"
# Defaults of MindFormers' LlamaConfig.
_DEFAULTS: Dict[str, Any] = {"compute_dtype": "float16", "hidden_size": 4096, "num_heads": 32}


def check_serving(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each reason why the model of a YAML cannot be served on its device; no file is read.

    The YAML must have model.model_config.
    """
    if run.is_mcore:
        yield from check_served(run)
    elif run.on_cpu:
        yield from check_cpu_serving(run.model_config)
    else:
        yield from _check_paged_attention(run.model_config)


def notes_on_serving(run: YamlRun) -> Iterator[Finding]:
    """Yields a note for each reason why the trained model of a YAML for Ascend cannot be served there.

    It skips mcore models, and legacy models without MindFormers' LlamaConfig: docs/serving.md lists the models
    that are served.
    """
    if run.on_cpu or run.model_config.get("type") != "LlamaConfig":
        return
    for finding in _check_paged_attention(run.model_config):
        yield note(finding.key, f"mindlora cannot serve this model on Ascend: {finding.found}", finding.advice)


def _check_paged_attention(model_config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each setting that MindFormers' paged attention on Ascend does not support."""
    computed, hidden, heads = (model_config.get(key) or default for key, default in _DEFAULTS.items())
    if dtype_name(computed, "compute_dtype") == "float32":
        yield error(
            f"{_MODEL_CONFIG}.compute_dtype",
            "compute_dtype is float32, and on Ascend MindFormers' paged attention computes in 16 bits alone.",
            f"Set --{_MODEL_CONFIG}.compute_dtype bfloat16, or serve it on a CPU (--device_target CPU).",
        )
    size = hidden // heads if hidden in COUNT and heads in COUNT else HEAD_MULTIPLE
    if size % HEAD_MULTIPLE:
        yield error(
            f"{_MODEL_CONFIG}.num_heads",
            f"hidden_size {hidden} and num_heads {heads} make heads of {size} numbers, but on Ascend MindFormers' "
            f"attention takes multiples of {HEAD_MULTIPLE}.",
            "Serve it on a CPU (--device_target CPU).",
        )


def dtype_key(run: YamlRun) -> str:
    """Returns the key of model_config for the dtype of linear cells' weights."""
    return "params_dtype" if run.is_mcore and "param_init_type" not in run.model else "param_init_type"


def held_dtype(run: YamlRun) -> Optional[str]:
    """Returns the 16-bit dtype in which a run on a CPU holds its base, if the YAML names one that it can hold.

    The weights of linear cells and embeddings then stay in it; everything else is computed in float32.
    """
    found = run.model.get(dtype_key(run))
    if not run.on_cpu or found is None or why_not_held(run):
        return None
    dtype = dtype_name(found, dtype_key(run))
    return dtype if dtype in _NARROW else None


def why_not_held(run: YamlRun) -> str:
    """Returns the feature of a run on a CPU that rules out a base in 16 bits; "" if there is none."""
    lora = run.language.lora
    if lora is None:
        return "weights of 16 bits do not train there, and without a pet_config all do"
    if run.mode == "predict":
        return "run_mode predict computes in float32"
    if not run.in_graph_mode:
        return "context.mode is not 0"
    architecture = run.architecture
    is_llama = architecture is not None and "LlamaConfig" in architecture.model_types
    if not is_llama and not (run.is_mcore and architecture is not None):
        return "of the legacy models of MindFormers, Llama alone holds one"
    if run.legacy_experts > 1:
        return "the routed experts of a legacy model multiply in float32"
    if lora.compute_dtype not in (None, "float32"):
        return f"pet_config.compute_dtype is {lora.compute_dtype}"
    return ""


def check_held_base(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for a product_dtype that has no effect, and a note on a base that stays in 16 bits."""
    lora = run.language.lora
    if lora is None:
        return
    held = held_dtype(run)
    if held is None and run.on_cpu and run.model.get(dtype_key(run)) not in (None, "float32", "fp32"):
        # check_cpu says why the base cannot be held so.
        return
    key = f"{run.language_key}.{_PRODUCTS}"
    if lora.product_dtype != "float32" and not run.on_cpu:
        yield error(
            key,
            f"product_dtype is {lora.product_dtype}, which is for a CPU.",
            "Remove it: elsewhere compute_dtype of model_config is what linear cells multiply in.",
        )
    elif lora.product_dtype != "float32" and held != lora.product_dtype:
        yield error(
            key,
            f"product_dtype is {lora.product_dtype} and the base is in {held or 'float32'}.",
            f"Set {MODEL}.{dtype_key(run)}: {lora.product_dtype}, which keeps the base in {lora.product_dtype}, or "
            "remove it.",
        )
    elif held is not None:
        yield note(
            f"{MODEL}.{dtype_key(run)}",
            f"The base stays in {held} on the CPU: linear cells multiply by its weights as they are, with products in "
            f"{lora.product_dtype}, and all else is computed in float32.",
            f"{_PRODUCTS}: bfloat16 is faster on a processor with AMX, and rounds what linear cells take."
            if held == "bfloat16" and lora.product_dtype == "float32"
            else "",
        )
