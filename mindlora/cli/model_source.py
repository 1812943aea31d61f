"""The model that a command runs: a YAML's (--config), or that of a folder from Hugging Face (--model)."""

import argparse
import contextlib
import os
import tempfile
from typing import Iterator

from mindlora.core.errors import ConfigError
from mindlora.core.overrides import keys_and_texts
from mindlora.core.yaml_file import read_merged
from mindlora.models.lora_config import QUANTIZATIONS
from mindlora.run.yaml_run import YamlRun


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --config and --model, one of which must be given, and the other options for the base and its tokenizer."""
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--config", metavar="YAML", help="the YAML of your training run, or one like it")
    sources.add_argument(
        "--model",
        metavar="FOLDER",
        help="in place of --config, a model's folder from Hugging Face: config.json, tokenizer, weights",
    )
    parser.add_argument(
        "--load_checkpoint",
        "--load-checkpoint",
        metavar="PATH",
        help="checkpoint of the base (default: the YAML's, or FOLDER). --a.b.c VALUE overrides any other key of the "
        "YAML",
    )
    parser.add_argument(
        "--tokenizer", metavar="T", help="tokenizer: a folder or file (default: the YAML's, or that in FOLDER)"
    )
    parser.add_argument(
        "--quantize-base",
        choices=QUANTIZATIONS,
        help="what holds the weights of linear layers: as_stored, on a CPU the integers of a quantized folder (GPTQ, "
        "AWQ, ...) themselves; nf4, a file that base quantize wrote (default: the YAML's, or the model's dtype, to "
        "which quantized weights are decoded)",
    )
    parser.set_defaults(overrides=[])


def source_of(arguments: argparse.Namespace) -> str:
    """Returns the YAML or the folder, for messages."""
    return str(arguments.config or arguments.model)


def check_source(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a missing YAML or folder, which would otherwise be reported after seconds of imports."""
    if arguments.config is not None and not os.path.isfile(arguments.config):
        raise ConfigError(f"--config {arguments.config} does not exist. Check the path.")
    if arguments.model is not None and not os.path.isdir(arguments.model):
        raise ConfigError(f"--model {arguments.model} is not a folder. Name a model's folder from Hugging Face.")


def name_of_base(arguments: argparse.Namespace) -> str:
    """Returns the default name of the base: the YAML's model or the folder."""
    from mindlora.run.configs.folder import name_of_folder

    asked = dict(keys_and_texts(arguments.overrides)).get("trainer.model_name")
    if asked:
        return asked
    return YamlRun(read_merged(arguments.config)).base_name if arguments.config else name_of_folder(arguments.model)


@contextlib.contextmanager
def yaml_of(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the path of the model's YAML; for a folder, of a temporary one.

    It is for the device of --device_target if that is among the overrides, or else for an NPU if MindSpore finds
    one. Raises as ``configs.folder.read_folder`` does.
    """
    if arguments.config is not None:
        yield arguments.config
        return
    from mindlora.core.yaml_file import yaml_text
    from mindlora.run.configs.folder import read_folder, served_content

    content = served_content(read_folder(arguments.model), _device(arguments), arguments.quantize_base)
    with tempfile.TemporaryDirectory(prefix="mindlora-model-") as folder:
        path = os.path.join(folder, "model.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(yaml_text([], content, {}))
        yield path


def _device(arguments: argparse.Namespace) -> str:
    import mindspore

    from mindlora.run.configs.folder import CPU, NPU

    asked = dict(keys_and_texts(arguments.overrides))
    target = asked.get("device_target") or asked.get("context.device_target")
    if target is None:
        target = "Ascend" if mindspore.hal.is_available("Ascend") else "CPU"
    return CPU if target == "CPU" else NPU
