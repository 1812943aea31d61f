"""A model's folder from Hugging Face: its config.json, the ids of its tokens, a check of its weights,
and its settings in a YAML."""

import dataclasses
import os
from typing import Any, Dict, List, Optional, Tuple, Union

from mindlora.core.errors import ConfigError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.core.json_files import parse_object
from mindlora.core.numerics.dtypes import FLOATS, dtype_name
from mindlora.core.text import examples
from mindlora.data.tokenizers import SpecialIds, load_tokenizer, special_ids
from mindlora.files.base.convert import in_mindformers_names
from mindlora.files.base.reader import CONFIG, BaseCheckpoint, companions_in
from mindlora.files.base.tokenizer_files import TurnEnd, stated_ends, turn_end
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture
from mindlora.models.architectures.hugging_face import HuggingFaceConfig
from mindlora.run.checks.cpu import cpu_keys

CPU, NPU = DEVICES = ("cpu", "npu")
# The default number of tokens of a row, with which memory grows.
_SEQ_LENGTH = 2048
# The keys of legacy models, and of mcore models.
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


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model for which a YAML can be written.

    Attributes:
        path (str): The folder, as given.
        config (HuggingFaceConfig): Its config.json.
        model_config (dict): The same for MindFormers, without dtypes, lengths and tokens.
        ids (SpecialIds): The tokens with which `mindlora data` begins, ends and pads rows.
        ends (int or list of int): The tokens that end an answer.
        stored (str): The dtype of the weights' matrices; "float32" if they differ.
        decoded (list of str): Notes on quantized weights in the folder; empty without any.
        unstated_end (TurnEnd or None): The token of ``ends`` that is in the chat template but not in the folder's
            files.
    """

    path: str
    config: HuggingFaceConfig
    architecture: Architecture
    model_config: Dict[str, Any]
    ids: SpecialIds
    ends: Union[int, List[int]]
    stored: str = "float32"
    decoded: List[str] = dataclasses.field(default_factory=list)
    unstated_end: Optional[TurnEnd] = None

    @property
    def name(self) -> str:
        """The model's name."""
        return name_of_folder(self.path)


def name_of_folder(path: str) -> str:
    """Returns the name of the model in a folder: the last part of the path."""
    return os.path.basename(os.path.abspath(path))


def read_folder(path: str, to_train: bool = False) -> ModelFolder:
    """Reads a folder from Hugging Face: config.json, the tokenizer, and the names and shapes of the weights.

    Raises ConfigError if it is not such a folder, or holds a setting that MindFormers lacks, or a model that is not
    trained (``to_train``) or not served; CheckpointError if the weights cannot be read; TokenizerError if there is no
    tokenizer.
    """
    config = _read_config(path)
    architecture = registry.by_hugging_face_type(config.model_type)
    draft = architecture.from_hugging_face if architecture is not None else None
    if architecture is None or draft is None or not _is_taken(architecture, to_train):
        raise ConfigError(_unknown_model(config, to_train))
    model_config = draft(config)
    stored, decoded = _check_weights(path, architecture, model_config)
    ids = special_ids(load_tokenizer(path))
    files = companions_in(path)
    ends = list(stated_ends(files) or (ids.eos,))
    end = turn_end(files)
    if end is None or end.token in ends or end.token >= model_config["vocab_size"]:
        end = None
    else:
        ends.append(end.token)
    return ModelFolder(
        path, config, architecture, model_config, ids, ends[0] if len(ends) == 1 else ends, stored, decoded, end
    )


def _read_config(folder: str) -> HuggingFaceConfig:
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        problem = f"{folder} has no {CONFIG}" if os.path.isdir(folder) else f"{folder} is not a folder"
        raise ConfigError(f"{problem}: name the folder of a model from Hugging Face.")
    with open(path, "rb") as file:
        return HuggingFaceConfig(path, parse_object(file.read(), path, ConfigError))


def _is_taken(architecture: Architecture, to_train: bool) -> bool:
    """Returns whether a model is trained, or served, from its folder."""
    fits = architecture.trains if to_train else architecture.legacy or architecture.served
    return fits and architecture.from_hugging_face is not None


def _unknown_model(config: HuggingFaceConfig, to_train: bool) -> str:
    """Returns why a model cannot be taken from its folder, and which models can."""
    classes = config.get("architectures", [])
    described = f"{config.path} says model_type {config.model_type!r}, architectures {classes}"
    architecture = registry.by_hugging_face_type(config.model_type)
    if architecture is not None and to_train and not architecture.trains:
        return f"{described}: MindFormers has {architecture.title} for prediction alone. Choose another model."
    if architecture is not None and not to_train and architecture.from_hugging_face is not None:
        return f"{described}: mindlora does not serve {architecture.title}. Serve it with vLLM or MindFormers."
    taken = [one for one in registry.ARCHITECTURES if _is_taken(one, to_train)]
    types = [kind for one in taken for kind in one.hugging_face_types]
    kinds = ", ".join(dict.fromkeys(types))
    return f"{described}: such a model cannot be taken from its folder. Choose one of model_type {kinds}."


def _check_weights(folder: str, architecture: Architecture, model_config: Dict[str, Any]) -> Tuple[str, List[str]]:
    """Raises ConfigError unless the tensors are those of the model that config.json describes.

    MindFormers would leave missing tensors random, and drop those without a place. Returns the dtype
    of the matrices, after decoding quantized ones, and notes on these.
    """
    tied = bool(model_config.get("tie_word_embeddings"))
    with BaseCheckpoint(folder) as base:
        stored = {tensor.name: tuple(tensor.shape) for tensor in in_mindformers_names(base)[0]}
        decoded = base.decoded.notes() if base.decoded else []
        dtypes = {tensor.dtype for tensor in base.tensors.values() if len(tensor.shape) > 1}
        head = architecture.head_weight(base.world)
        if head not in base.tensors and not tied:
            advice = base.advice_without_head
            raise ConfigError(
                f"{folder}: the weights lack {head}, but {CONFIG} does not say tie_word_embeddings: true. {advice}"
            )
    expected = {name: tuple(size.shape) for name, size in architecture.parameter_sizes(model_config).items()}
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected and not names.is_computed(name)]
    if tied:
        unexpected = [name for name in unexpected if not names.is_output_head(name.rpartition(".")[0])]
    differing = [name for name in expected if name in stored and stored[name] != expected[name]]
    for what, different in (("lack", missing), ("have tensors that the model lacks:", unexpected)):
        if different:
            raise ConfigError(
                f"{folder}: the weights {what} {examples(different)}, if the model is as {CONFIG} says. Copy the model "
                "again, or correct the settings there."
            )
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{folder}: {name} has the shape {list(stored[name])}, but {CONFIG} makes it {list(expected[name])}. "
            "Copy the model again."
        )
    return dtype_name(dtypes.pop()) if len(dtypes) == 1 and dtypes <= set(FLOATS) else "float32", decoded


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
    """Returns the keys of model_config for dtypes, and other settings that a device needs."""
    if legacy:
        return cpu_keys() if device == CPU else _LEGACY_DTYPES
    return dict.fromkeys(_MCORE_DTYPES, "float32") if device == CPU else {**_MCORE_DTYPES, "use_flash_attention": True}


def seq_length_of(folder: ModelFolder, asked: Optional[int]) -> int:
    """Returns the tokens of a row: ``asked``, or else 2048 if the model takes as many.

    Raises ConfigError if a token would not see all tokens before it, as it does in MindFormers' models.
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


def served_content(folder: ModelFolder, device: str, quantize_base: Optional[str] = None) -> Dict[str, Any]:
    """Returns the content of a YAML that serves a model, or generates with it.

    On a CPU the embedding and the weights of linear cells are held in the dtype in which they are stored, or as
    ``quantize_base``, that of LoraConfig, says.
    """
    nodes = model_nodes(folder, device, seq_length_of(folder, None))
    if device == CPU:
        legacy = folder.architecture.legacy
        keys = ("param_init_type", "embedding_init_type") if legacy else ("params_dtype",)
        nodes["model"]["model_config"].update(dict.fromkeys(keys, folder.stored))
    if quantize_base is not None:
        pet_config = {"pet_type": "lora", "target_modules": "all-linear", "quantize_base": quantize_base}
        nodes["model"]["model_config"]["pet_config"] = pet_config
    return {
        "run_mode": "predict",
        "load_checkpoint": folder.path,
        "load_ckpt_format": "safetensors",
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": folder.name},
        "use_parallel": False,
        **nodes,
    }
