"""What a YAML says of a model whose folder was read, whatever it does with it: model, context, weights."""

from typing import Any, Dict, Optional

from mindlora.core.errors import ConfigError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.run.checks.cpu import cpu_keys
from mindlora.run.configs.folder import ModelFolder

CPU, NPU = DEVICES = ("cpu", "npu")
# Tokens of a row where nobody says: memory grows with it.
_SEQ_LENGTH = 2048
# The keys of legacy models, and those of mcore models.
_LEGACY_DTYPES = {
    "compute_dtype": "bfloat16",
    "param_init_type": "bfloat16",
    "layernorm_compute_type": "float32",
    "softmax_compute_type": "float32",
    "rotary_dtype": "float32",
    "use_flash_attention": True,
}
_MCORE_DTYPES = {
    "params_dtype": "bfloat16",
    "compute_dtype": "bfloat16",
    "layernorm_compute_dtype": "float32",
    "softmax_compute_dtype": "float32",
    "rotary_dtype": "float32",
}
_CONTEXTS: Dict[str, Dict[str, Any]] = {
    CPU: {"mode": 0, "device_target": "CPU"},
    NPU: {"mode": 0, "device_target": "Ascend", "max_device_memory": "58GB"},
}
# As in MindFormers' YAMLs for Llama 3.1, and for Qwen3.
_LEGACY_COMPILER: Dict[str, Any] = {"jit_config": {"jit_level": "O1"}}
_MCORE_COMPILER: Dict[str, Any] = {
    "memory_optimize_level": "O0",
    "jit_config": {"jit_level": "O0"},
    "ascend_config": {"precision_mode": "must_keep_origin_dtype"},
}


def model_nodes(folder: ModelFolder, device: str, seq_length: int) -> Dict[str, Any]:
    """Returns the nodes model and context, and use_legacy for an mcore model, of a YAML for "cpu" or "npu"."""
    architecture = folder.architecture
    legacy = architecture.legacy
    model_config = {
        **folder.model_config,
        "seq_length": seq_length,
        "bos_token_id": folder.ids.bos,
        "eos_token_id": folder.ends,
        "pad_token_id": folder.ids.pad,
        "ignore_token_id": IGNORE_TOKEN_ID,
        **_dtypes(legacy, device),
    }
    if folder.ids.bos is None:
        del model_config["bos_token_id"]
    model: Dict[str, Any] = {"model_config": model_config}
    if legacy:
        model["arch"] = {"type": architecture.model_types[0]}
    compiler = _LEGACY_COMPILER if legacy else _MCORE_COMPILER
    context = {**_CONTEXTS[device], **(compiler if device == NPU else {})}
    return {**({} if legacy else {"use_legacy": False}), "context": context, "model": model}


def _dtypes(legacy: bool, device: str) -> Dict[str, Any]:
    """Returns the keys of model_config that hold dtypes, and what else a device needs."""
    if legacy:
        return cpu_keys() if device == CPU else _LEGACY_DTYPES
    return dict.fromkeys(_MCORE_DTYPES, "float32") if device == CPU else {**_MCORE_DTYPES, "use_flash_attention": True}


def seq_length_of(folder: ModelFolder, asked: Optional[int]) -> int:
    """Returns the tokens of a row: ``asked``, or else 2048 if the model takes as many.

    Raises ConfigError if a token would not see all tokens before it, which it does in MindFormers' models.
    """
    window = folder.config.window()
    if asked is None:
        return min(_SEQ_LENGTH, window or _SEQ_LENGTH, folder.config.count("max_position_embeddings", _SEQ_LENGTH))
    if window is not None and asked > window:
        raise ConfigError(
            f"{folder.config.path}: sliding_window is {window}, MindFormers' {folder.architecture.title} has no such "
            f"window, and rows of {asked} tokens are longer. Use rows of at most {window} tokens."
        )
    return asked


def served_content(folder: ModelFolder, device: str) -> Dict[str, Any]:
    """Returns the content of a YAML by which a model is served, or answers.

    On a CPU the weights of linear cells are held in the dtype in which they are stored.
    """
    nodes = model_nodes(folder, device, seq_length_of(folder, None))
    if device == CPU:
        legacy = folder.architecture.legacy
        held = {"param_init_type": folder.stored, "embedding_init_type": "float32"}
        nodes["model"]["model_config"].update(held if legacy else {"params_dtype": folder.stored})
    return {
        "run_mode": "predict",
        "load_checkpoint": folder.path,
        "load_ckpt_format": "safetensors",
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": folder.name},
        "use_parallel": False,
        **nodes,
    }
