"""The options of generate, chat and serve, and their engine, with MindFormers' log off the screen."""

import argparse
import atexit
import contextlib
import difflib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.cli.model_source import add_model_options, check_source, source_of, yaml_of
from mindlora.cli.verb import quiet_transformers
from mindlora.core.errors import ConfigError, RequestError
from mindlora.core.operator_library import load_before_mindspore
from mindlora.core.text import shown
from mindlora.core.yaml_file import PET
from mindlora.training.launch.imports import import_mindformers

if TYPE_CHECKING:
    from mindlora.serving.adapter_registry import AdapterRegistry
    from mindlora.serving.chat_prompt import PromptForm
    from mindlora.serving.engine import Engine
    from mindlora.serving.request import Sampling

# Options that are fields of EngineSettings.
_SIZES: Tuple[Tuple[str, str], ...] = (
    ("seq-length", "tokens of a prompt and its answer together (default: the YAML's)"),
    ("slots", "adapters on the device at once"),
    (
        "max-rank",
        "the largest rank of an adapter (default: 64; in generate, chat and eval the rank of --adapter if larger)",
    ),
    ("adapter-memory", "bytes of host memory for adapters that are not on the device (default: 2 GiB)"),
    ("block-size", "tokens in a block of the key-value cache (default: 16)"),
    ("num-blocks", "blocks of the cache (default: enough for all running requests at their longest)"),
    ("max-running", "requests that a step serves together"),
    ("max-tokens-per-step", "tokens that a step computes (default: 512)"),
    ("max-waiting", "requests that wait"),
    (
        "prompt-lookup",
        "tokens that are guessed at a time from the text so far, for answers that repeat it (default: 0)",
    ),
)
# Options that are fields of Sampling: name, type, help.
_SAMPLING = (
    ("top-p", float, "draw from the likeliest tokens whose probabilities add up to this (default: 1, all)"),
    ("top-k", int, "draw from the N likeliest tokens alone (default: 0, all)"),
    ("repetition-penalty", float, "above 1, tokens that occurred already become less likely (default: 1)"),
    ("seed", int, "seed of the draws: the same seed gives the same answer (default: a new one each time)"),
)
_LOG = "mindlora-log-"


class Adapters(NamedTuple):
    """The adapters that a command line names, and the names given by --adapter, in order."""

    registry: "AdapterRegistry"
    chosen: List[str]


def add_engine_options(parser: argparse.ArgumentParser, defaults: Dict[str, str]) -> None:
    """Adds the options for base, adapters and sizes; overrides of the YAML are taken too.

    ``defaults`` has the defaults of slots, max-running and max-waiting, for the help.
    """
    add_model_options(parser)
    parser.add_argument("--adapters", metavar="DIR", help="folder whose subfolders are adapters")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="an adapter, called like its folder unless named; or the name of one in the folder of --adapters; may be "
        "given repeatedly",
    )
    parser.add_argument("--verbose", action="store_true", help="print MindFormers' log on standard error")
    parser.add_argument(
        "--no-graph-cache",
        action="store_true",
        help="compile anew: by default compiled graphs are kept for later starts on a CPU, in ~/.cache/mindlora/graphs "
        "or the folder that MINDLORA_GRAPH_CACHE names",
    )
    sizes = parser.add_argument_group("sizes")
    for name, text in _SIZES:
        note = f" (default: {defaults[name]})" if name in defaults else ""
        sizes.add_argument(f"--{name}", type=int, metavar="N", help=text + note)
    sizes.add_argument(
        "--adapter-dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of adapters in slots; an adapter that it would round is refused (default: the network's dtype)",
    )
    sizes.add_argument(
        "--product-dtype",
        choices=("float32", "bfloat16"),
        help="dtype in which linear layers multiply on a CPU; bfloat16 rounds their inputs, as vLLM does (default: "
        "bfloat16 where the base is in bfloat16 or NF4 and that is faster on the processor, else float32)",
    )
    sizes.add_argument(
        "--fixed-batches",
        type=fixed_batches,
        metavar="N,...",
        help="numbers of requests, such as 1,2,4,8, for which decoding gets a faster graph of its own; each adds "
        "seconds to the start (default: none)",
    )


def add_answer_options(
    parser: argparse.ArgumentParser, template: str, temperature: float, max_tokens: str, defaults: Dict[str, str]
) -> None:
    """Adds the options for prompts and sampling, and those of add_engine_options.

    For the help, ``template`` describes the default of --template, and ``max_tokens`` that of --max-tokens.
    """
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--template",
        metavar="FORM",
        help="what a text becomes: chat (the tokenizer's chat template), alpaca or plain (the prompts of mindlora data "
        rf"alpaca), a text with {{instruction}} and \n for a new line, or none, the text itself (default: {template})",
    )
    prompts.add_argument(
        "--chat-template", metavar="FILE", help="chat template in Jinja, instead of the tokenizer's own"
    )
    prompts.add_argument(
        "--chat-template-kwargs",
        type=template_variables,
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}'",
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message, for a chat template")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--max-tokens", type=int, metavar="N", help=f"tokens of an answer (default: {max_tokens})")
    answers.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="X",
        help="0 takes the likeliest token each time; the larger, the more varied (default: %(default)s)",
    )
    for name, kind, text in _SAMPLING:
        answers.add_argument(f"--{name}", type=kind, metavar="X" if kind is float else "N", help=text)
    answers.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends an answer; may be given repeatedly"
    )
    add_engine_options(parser, defaults)


def template_variables(text: str) -> Dict[str, Any]:
    """Returns the variables of --chat-template-kwargs, for argparse."""
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise argparse.ArgumentTypeError(f'{text!r} must be a JSON object such as {{"enable_thinking": false}}.')
    return variables


def fixed_batches(text: str) -> Tuple[int, ...]:
    """Returns the numbers of --fixed-batches, for argparse."""
    try:
        return tuple(int(count) for count in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers such as 1,2,4,8.") from error


def given_fields(arguments: argparse.Namespace, options: Sequence[str]) -> Dict[str, Any]:
    """Returns the given options by the names of fields."""
    fields = [option.replace("-", "_") for option in options]
    return {field: getattr(arguments, field) for field in fields if getattr(arguments, field) is not None}


def read_answer_options(arguments: argparse.Namespace) -> Tuple["Sampling", Adapters]:
    """Returns the sampling and the adapters; also checks the options of prompts, without reading files."""
    from mindlora.serving.chat_prompt import check_prompt_options

    sampling = _read_sampling(arguments)
    check_prompt_options(arguments.template, arguments.chat_template, arguments.chat_template_kwargs)
    return sampling, read_adapters(arguments)


def prompt_form(arguments: argparse.Namespace, tokenizer: Any, chat: bool = False) -> "PromptForm":
    """Returns the form of prompts by the options of add_answer_options; ``chat`` is as in choose_prompt_form."""
    from mindlora.serving.chat_prompt import choose_prompt_form

    variables = arguments.chat_template_kwargs
    return choose_prompt_form(tokenizer, arguments.template, arguments.chat_template, chat, variables)


def _read_sampling(arguments: argparse.Namespace) -> "Sampling":
    r"""Returns the checked sampling of the options; the caller sets max_tokens. \n in --stop is a new line."""
    from mindlora.serving.request import Sampling
    from mindlora.serving.sampling import check_sampling

    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise RequestError(f"--max-tokens is {arguments.max_tokens}: ask for at least one token.")
    if "" in arguments.stop:
        raise RequestError("--stop is empty: leave it out, or name a text.")
    sampling = Sampling(
        temperature=arguments.temperature,
        stop=tuple(text.replace("\\n", "\n") for text in arguments.stop),
        **given_fields(arguments, [name for name, *_ in _SAMPLING]),
    )
    check_sampling(sampling)
    return sampling


def read_adapters(arguments: argparse.Namespace) -> Adapters:
    """Returns the adapters of --adapter and --adapters; no file is read.

    Raises ConfigError if a path does not exist, or a name is given twice.
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
    raise ConfigError(f"--adapter {text}: {unknown_adapter(text, folder)} Give an adapter's path, or NAME=PATH.")


def unknown_adapter(name: str, registry: "AdapterRegistry") -> str:
    """Returns an error for an unknown name of an adapter, with similar names."""
    names = registry.names()
    where = "there is no such file or folder" + (f", and no adapter of that name in {registry.folder}" if names else "")
    near = " or ".join(map(shown, difflib.get_close_matches(name, names, n=3)))
    return f"{where}.{f' Did you mean {near}?' if near else ''}"


def build(
    arguments: argparse.Namespace,
    registry: "AdapterRegistry",
    model_name: Optional[str] = None,
    defaults: Optional[Dict[str, int]] = None,
    chosen: Sequence[str] = (),
) -> "Engine":
    """Returns the engine of a command line, not started.

    Callers name the base ``model_name``, or by the YAML's name; ``defaults`` has fields of EngineSettings that the
    command line does not set; ``chosen`` are the adapters that are known to be used.

    Raises LoraError if a setting is wrong, or a file cannot be read.
    """
    check_source(arguments)
    prepare_imports()
    overrides = [*arguments.overrides]
    if arguments.load_checkpoint:
        overrides += ["--load_checkpoint", arguments.load_checkpoint]
    if arguments.quantize_base:
        overrides += [f"--{PET}.quantize_base", arguments.quantize_base]
    fields = ["adapter-dtype", "product-dtype", "fixed-batches", *(name for name, _ in _SIZES)]
    sizes = {**(defaults or {}), **given_fields(arguments, fields)}
    with yaml_of(arguments) as config:
        # It takes seconds to import, so the faults above are reported first.
        import_mindformers()
        from mindlora.network.graph_cache import VARIABLE, keep_in_home
        from mindlora.training.launch.serve import build_engine

        tokenizer = arguments.tokenizer or arguments.model
        engine = build_engine(config, overrides, tokenizer, registry, sizes, model_name, chosen)
    # Not earlier: now it is known whether the device keeps graphs, and none is compiled until the engine starts.
    if arguments.no_graph_cache:
        os.environ[VARIABLE] = ""
    keep_in_home(say, "--no-graph-cache")
    for note in engine.base_notes:
        say(note)
    if engine.runner.rounds and "product_dtype" not in sizes:
        say("linear layers multiply in bfloat16, which is faster here; in float32 with --product-dtype float32")
    return engine


def prepare_imports() -> None:
    """Sets up the process before MindSpore and transformers are imported."""
    # Threads that spin between kernels cost more than they gain on few cores. MindSpore's warnings do not concern the
    # user of a model.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("GLOG_v", "3")
    quiet_transformers()
    # After GOMP_SPINCOUNT is set: libgomp comes with it.
    load_before_mindspore()


def say(text: str) -> None:
    """Prints one of the command's own lines to stderr."""
    print(f"mindlora: {text}", file=sys.stderr, flush=True)


def remove_log() -> None:
    """Removes the folder of MindFormers' log, if it was created here."""
    folder = os.environ.get("LOG_MF_PATH", "")
    if os.path.basename(folder).startswith(_LOG):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loaded_engine(arguments: argparse.Namespace, adapters: Adapters, defaults: Dict[str, int]) -> Iterator["Engine"]:
    """Builds the engine of a command line, with its chosen adapters read and checked, and stops it at the end.

    ``defaults`` and errors are as in ``build``.
    """
    check_source(arguments)
    with log_elsewhere(arguments.verbose):
        say(f"loading {source_of(arguments)} ...")
        begin = time.monotonic()
        prepare_imports()
        import_mindformers()
        with _warnings_on_screen():
            engine = build(arguments, adapters.registry, defaults=defaults, chosen=adapters.chosen)
            for name in adapters.chosen:
                engine.adapters.memory.load(name)
            say(f"loaded in {time.monotonic() - begin:.0f} s")
            try:
                yield engine
            finally:
                if engine.alive:
                    engine.stop()


def start(engine: "Engine", **expected: bool) -> None:
    """Starts an engine and prints how long it took; ``expected`` is as for Engine.start."""
    say("compiling ...")
    begin = time.monotonic()
    engine.start(**expected)
    say(f"compiled in {time.monotonic() - begin:.0f} s")


@contextlib.contextmanager
def log_elsewhere(verbose: bool) -> Iterator[None]:
    """Sends MindFormers' log to a temporary folder, unless ``verbose``."""
    if verbose:
        yield
        return
    if "LOG_MF_PATH" not in os.environ:
        os.environ["LOG_MF_PATH"] = tempfile.mkdtemp(prefix=_LOG)
        atexit.register(remove_log)
    # Left open, since MindFormers logs to it until the process ends.
    with contextlib.redirect_stdout(open(os.devnull, "w", encoding="utf-8")):  # noqa: SIM115
        yield


@contextlib.contextmanager
def _warnings_on_screen():
    from mindlora.training.log import logger

    handler = _Warnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Warnings(logging.Handler):
    """Prints mindlora's warnings in the form of its errors."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")
