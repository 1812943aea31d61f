"""The options that pick base, adapters and sizes, and the engine made of them: for serve, generate and chat."""

import argparse
import difflib
import os
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.common.text import shown
from mindlora.errors import ConfigError

if TYPE_CHECKING:
    from mindlora.serving.adapter_registry import AdapterRegistry
    from mindlora.serving.engine import Engine

# Options that are fields of EngineSettings.
_SIZES: Tuple[Tuple[str, str], ...] = (
    ("seq-length", "tokens of a prompt and its answer together (default: the YAML's)"),
    ("slots", "adapters on the device at once"),
    ("max-rank", "the largest rank of an adapter (default: 64)"),
    ("adapter-memory", "bytes of host memory for adapters that are not on the device (default: 2 GiB)"),
    ("block-size", "tokens in a block of the key-value cache (default: 16)"),
    ("num-blocks", "blocks of the cache (default: enough for all running requests at their longest)"),
    ("max-running", "requests that a step serves together"),
    ("max-tokens-per-step", "tokens that a step computes (default: 512)"),
    ("max-waiting", "requests that wait"),
)


class Adapters(NamedTuple):
    """The adapters that a command line names.

    Attributes:
        registry (AdapterRegistry): All of them.
        chosen (list of str): The names of those that --adapter names, in order.
    """

    registry: "AdapterRegistry"
    chosen: List[str]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds --config, --load_checkpoint, --tokenizer, --adapter and --adapters; overrides of the YAML are taken too."""
    parser.add_argument("--config", required=True, metavar="YAML", help="the YAML that trained, or one like it")
    parser.add_argument(
        "--load_checkpoint",
        "--load-checkpoint",
        metavar="PATH",
        help="checkpoint of the base (default: the YAML's). --a.b.c VALUE overrides any other key of the YAML",
    )
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer: a folder or file (default: the YAML's)")
    parser.add_argument("--adapters", metavar="DIR", help="folder whose subfolders are adapters")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="an adapter, called like its folder unless named; or the name of one in the folder of --adapters; may be "
        "given repeatedly",
    )
    parser.set_defaults(overrides=[])


def add_size_options(parser: argparse.ArgumentParser, defaults: Dict[str, str]) -> None:
    """Adds the options for the fields of EngineSettings.

    Args:
        parser (ArgumentParser): Of the verb.
        defaults (dict): For the help: what slots, max-running and max-waiting are if they are not given.
    """
    group = parser.add_argument_group("sizes")
    for name, text in _SIZES:
        note = f" (default: {defaults[name]})" if name in defaults else ""
        group.add_argument(f"--{name}", type=int, metavar="N", help=text + note)


def given_fields(arguments: argparse.Namespace, options: Sequence[str]) -> Dict[str, Any]:
    """Returns those of the options that were given, by the names of fields."""
    fields = [option.replace("-", "_") for option in options]
    return {field: getattr(arguments, field) for field in fields if getattr(arguments, field) is not None}


def read_adapters(arguments: argparse.Namespace) -> Adapters:
    """Returns the adapters of --adapter and --adapters; no file is read.

    Raises:
        ConfigError: There is nothing at a path, or a name is given twice.
    """
    from mindlora.serving.adapter_registry import AdapterRegistry

    folder = AdapterRegistry(arguments.adapters)
    paths: Dict[str, str] = {}
    chosen = []
    for text in arguments.adapter:
        name, path = _named_path(text, folder)
        if name in chosen:
            raise ConfigError(f"--adapter {text}: {name} was given before. Write NAME=PATH with another name.")
        chosen.append(name)
        if path is not None:
            paths[name] = path
    return Adapters(AdapterRegistry(arguments.adapters, paths), chosen)


def _named_path(text: str, folder: "AdapterRegistry") -> Tuple[str, Optional[str]]:
    """Returns name and path of one --adapter; the path is None for a name in the folder of --adapters."""
    name, separator, path = text.partition("=")
    if separator and name and path and not os.path.exists(text):
        return name, path
    if text in folder:
        return text, None
    if text and os.path.exists(text):
        stem, ending = os.path.splitext(os.path.basename(os.path.abspath(text)))
        return (stem if ending in (".ckpt", ".safetensors") else stem + ending), text
    raise ConfigError(f"--adapter {text}: {unknown_adapter(text, folder)}")


def unknown_adapter(name: str, registry: "AdapterRegistry") -> str:
    """Returns why there is no adapter of that name, and which names are like it."""
    names = registry.names()
    where = "there is no such file or folder" + (f", and no adapter of that name in {registry.folder}" if names else "")
    near = difflib.get_close_matches(name, names, n=3)
    return f"{where}.{f' Did you mean {_or(near)}?' if near else ''}"


def _or(names: List[str]) -> str:
    return " or ".join(map(shown, names))


def check_config(arguments: argparse.Namespace) -> None:
    """Raises ConfigError if there is no YAML, which mindlora-run's reader says only after seconds of imports."""
    if not os.path.isfile(arguments.config):
        raise ConfigError(f"--config {arguments.config} does not exist.")


def build(
    arguments: argparse.Namespace,
    registry: "AdapterRegistry",
    model_name: Optional[str] = None,
    defaults: Optional[Dict[str, int]] = None,
) -> "Engine":
    """Returns the engine that a command line describes, not started.

    Args:
        arguments (Namespace): With the options of add_engine_options and add_size_options.
        registry (AdapterRegistry): The adapters.
        model_name (str, optional): What callers name the base. Default: None, the YAML's name.
        defaults (dict, optional): Fields of EngineSettings where the command line gives none.

    Raises:
        LoraError: A setting is wrong, or a file cannot be read.
    """
    check_config(arguments)
    prepare_imports()
    # It takes seconds to import: what is wrong above is said before that.
    from mindlora.plugin.serve import build_engine

    overrides = [*arguments.overrides]
    if arguments.load_checkpoint:
        overrides += ["--load_checkpoint", arguments.load_checkpoint]
    sizes = {**(defaults or {}), **given_fields(arguments, [name for name, _ in _SIZES])}
    return build_engine(arguments.config, overrides, arguments.tokenizer, registry, sizes, model_name)


def prepare_imports() -> None:
    """Sets what MindSpore and transformers read from the environment when they are imported."""
    # Threads that spin between kernels cost more than they gain on few cores. MindSpore's warnings are not for the user
    # of a model.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("GLOG_v", "3")
    # transformers would advise installing PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
