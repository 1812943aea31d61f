"""The model under an adapter, named by --base FOLDER|YAML: its kind and the sizes of its attention."""

import argparse
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from mindlora.files.adapters.convert import Heads

# Flags that an option of this module replaces: for adapters, for bases, and for all. They go with the next
# version.
SIZES = ("--heads", "--kv-heads", "--head-dim", "--q-lora-rank")
ARCHITECTURE = "--architecture"
BASE_HEADS, KEY_VALUE_HEADS = SIZES[:2], SIZES[1:2]


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """The facts about a base model.

    Attributes:
        heads (Heads): The sizes of its attention, and its order of rows in joined cells.
        config (mapping): Its config.json, or a YAML's settings of the model with the model_type of a config.json; empty
            if no option names the model.
        is_graph_yaml (bool): Whether ``config`` is the model_config of a YAML for graph mode.
    """

    heads: "Heads"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_graph_yaml: bool = False


def add_base_model(parser: argparse.ArgumentParser, option: str, purpose: str, earlier: Sequence[str] = SIZES) -> None:
    """Adds ``option``, which names a base model, with ``purpose`` as its help; ``earlier`` flags stay unlisted."""
    parser.add_argument(option, metavar="FOLDER|YAML", help=purpose)
    for flag in earlier:
        parser.add_argument(flag, type=str if flag == ARCHITECTURE else int, help=argparse.SUPPRESS)


def base_model(arguments: argparse.Namespace, option: str = "--base") -> BaseModel:
    """Returns the model of add_base_model's ``option``, or of the earlier flags, with a warning on stderr.

    Raises ConfigError if the folder or the YAML does not say how many heads the model has.
    """
    from mindlora.files.adapters.convert import Heads

    path = getattr(arguments, option[2:])
    found = read_base_model(path) if path else BaseModel(Heads())
    flags = [flag for flag in (*SIZES, ARCHITECTURE) if _value(arguments, flag) is not None]
    if not flags:
        return found
    print(
        f'"{" ".join(flags)}" is given as "{option} FOLDER|YAML" now, the base model\'s folder or YAML; the earlier '
        "form goes with the next version.",
        file=sys.stderr,
    )
    fields = {"--heads": "heads", "--kv-heads": "kv_heads", "--head-dim": "head_dim", "--q-lora-rank": "q_rank"}
    sizes = {fields[flag]: _value(arguments, flag) for flag in flags if flag in fields}
    return dataclasses.replace(found, heads=dataclasses.replace(found.heads, **sizes))


def _value(arguments: argparse.Namespace, flag: str) -> Any:
    return getattr(arguments, flag[2:].replace("-", "_"), None)


def read_base_model(path: str) -> BaseModel:
    """Returns the facts about a model in its folder's config.json or in a MindFormers YAML.

    Raises:
        ConfigError: The file cannot be read, or does not say how many heads the model has.
    """
    from mindlora.core.errors import ConfigError
    from mindlora.files.adapters.convert import Heads
    from mindlora.files.adapters.sharding.run_settings import heads_of

    is_folder = os.path.isdir(path)
    content, is_graph_yaml = (_config_of_folder(path), False) if is_folder else _config_of_yaml(path)
    heads = heads_of(content, Heads())
    if heads.heads is None:
        key = "num_attention_heads" if is_folder else "num_heads or num_attention_heads in its model"
        raise ConfigError(
            f"{path} does not say how many heads the attention of the model has: it lacks {key}. Name the folder with "
            "the model's whole config.json, or its complete YAML."
        )
    return BaseModel(heads, content, is_graph_yaml)


def _config_of_folder(folder: str) -> Dict[str, Any]:
    from mindlora.core.errors import ConfigError
    from mindlora.core.json_files import parse_object

    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise ConfigError(
            f"{folder} has no config.json, which says what model it is. Name the folder that has it, or the model's "
            "MindFormers YAML."
        )
    with open(path, "rb") as file:
        return parse_object(file.read(), path, ConfigError)


def _config_of_yaml(path: str) -> Tuple[Dict[str, Any], bool]:
    """Returns a YAML's settings of its model, with the model_type of its class, and whether it is for graph mode."""
    from mindlora.core.yaml_file import read_merged, read_yaml
    from mindlora.run.checks.pynative import architecture_of, is_pynative
    from mindlora.run.yaml_run import YamlRun

    content = read_merged(path)
    if is_pynative(content):
        model = dict(content.get("model") or {})
        return {**model, "model_type": _model_type(architecture_of(model), model)}, False
    run = YamlRun(read_yaml(path)).language
    return {**run.model, "model_type": _model_type(run.architecture, run.model)}, True


def _model_type(architecture: Any, model_config: Mapping[str, Any]) -> Optional[str]:
    """Returns the model_type of a config.json; None if it is unknown."""
    from mindlora.models.architectures.llama import LLAMA
    from mindlora.models.architectures.qwen import QWEN2

    if isinstance(model_config.get("model_type"), str):
        return str(model_config["model_type"])
    # MindFormers has Qwen2 as a Llama with biases, and as an mcore model.
    if architecture is QWEN2 or architecture is LLAMA and model_config.get("qkv_has_bias"):
        return "qwen2"
    types: Sequence[str] = architecture.hugging_face_types if architecture else ()
    return types[0] if types else None
