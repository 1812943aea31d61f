"""A model's folder from Hugging Face: its config.json, the ids of its tokens, whether its weights are as it says."""

import dataclasses
import os
from typing import Any, Dict, List, Optional, Tuple, Union

from mindlora.core.errors import ConfigError
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


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model that a YAML can be written for.

    Attributes:
        path (str): The folder, as it was given.
        config (HuggingFaceConfig): Its config.json.
        model_config (dict): The same for MindFormers, without dtypes, lengths and tokens.
        ids (SpecialIds): The tokens with which `mindlora data` begins, ends and pads rows.
        ends (int or list of int): The tokens that end an answer.
        stored (str): The dtype of the weights' matrices; "float32" if they differ.
        decoded (list of str): Notes on the weights that the folder holds in a quantized form; empty without.
        unstated_end (TurnEnd or None): That of ``ends`` which the chat template has, and the folder's files do not.
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
        """What the model is called."""
        return name_of_folder(self.path)


def name_of_folder(path: str) -> str:
    """Returns what the model in a folder is called: the last part of the path."""
    return os.path.basename(os.path.abspath(path))


def read_folder(path: str, to_train: bool = False) -> ModelFolder:
    """Reads a folder of Hugging Face's: config.json, the tokenizer, and names and shapes of the weights.

    Raises ConfigError if it is not one, or holds a setting that MindFormers lacks, or a model that is not trained
    (``to_train``) or not served; CheckpointError if the weights cannot be read; TokenizerError if there is no
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
    """Returns why a model cannot be taken from its folder, and which ones can."""
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

    What MindFormers did not find it would leave random, and what it has no place for it would drop. Returns the dtype
    of the matrices, quantized ones as they are decoded, and notes on the latter.
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
                f"{folder}: the weights lack {head}, and {CONFIG} does not say tie_word_embeddings: true. {advice}"
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
            f"{folder}: {name} has the shape {list(stored[name])}, and as {CONFIG} says it has {list(expected[name])}. "
            "Copy the model again."
        )
    return dtype_name(dtypes.pop()) if len(dtypes) == 1 and dtypes <= set(FLOATS) else "float32", decoded
