"""mindlora serve: an OpenAI-compatible server for one base and many adapters."""

import argparse
import dataclasses
import sys
from typing import Any, Dict, List, Tuple

from mindlora.cli.verb import Verb, add_command
from mindlora.errors import ConfigError

# Options that are fields of ServerSettings: name, type, metavar, help.
_LIMITS: Tuple[Tuple[str, Any, str, str], ...] = (
    ("max-body-bytes", int, "N", "bytes of a request's body (default: 4 MiB)"),
    ("max-prompt-tokens", int, "N", "tokens of a prompt (default: as many as the model takes)"),
    ("max-output-tokens", int, "N", "tokens of an answer (default: as many as the model takes)"),
    ("max-choices", int, "N", "answers that one request may ask for, prompts times n (default: 64)"),
    ("key-requests", int, "N", "requests that one key may have running or waiting (default: any number)"),
    ("key-requests-per-minute", int, "N", "requests that one key may send in a minute (default: any number)"),
    ("request-seconds", float, "S", "time in which a request must be answered (default: 600)"),
)
# Options that are fields of EngineSettings.
_SIZES: Tuple[Tuple[str, str], ...] = (
    ("seq-length", "tokens of a prompt and its answer together (default: the YAML's)"),
    ("slots", "adapters on the device at once (default: 8)"),
    ("max-rank", "the largest rank of an adapter (default: 64)"),
    ("adapter-memory", "bytes of host memory for adapters that are not on the device (default: 2 GiB)"),
    ("block-size", "tokens in a block of the key-value cache (default: 16)"),
    ("num-blocks", "blocks of the cache (default: enough for all running requests at their longest)"),
    ("max-running", "requests that a step serves together (default: 32)"),
    ("max-tokens-per-step", "tokens that a step computes (default: 512)"),
    ("max-waiting", "requests that wait, before others get 429 (default: 1024)"),
)


@dataclasses.dataclass(frozen=True)
class ServeReport:
    """What a server did until it was stopped.

    Attributes:
        model (str): The base's name.
        prompt_tokens, cached_tokens, generated_tokens (int): Tokens of prompts, those of them that were in the cache,
            and of answers.
    """

    model: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.model}: {self.generated_tokens} tokens generated; {self.prompt_tokens} of prompts, "
            f"{self.cached_tokens} of them from the cache"
        )


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.description += " docs/serving.md explains everything."
    parser.add_argument("--config", required=True, metavar="YAML", help="the YAML that trained, or one like it")
    parser.add_argument("--load-checkpoint", metavar="PATH", help="checkpoint of the base (default: the YAML's)")
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer: a folder or file (default: the YAML's)")
    parser.add_argument("--adapters", metavar="DIR", help="folder whose subfolders are adapters")
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=PATH", help="one more adapter; may be given repeatedly"
    )
    parser.add_argument("--model-name", metavar="NAME", help="what requests call the base (default: the YAML's name)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 for any that is free (default: 8000)")
    _add_access(parser.add_argument_group("who may use it"))
    _add_prompts(parser.add_argument_group("prompts and logs"))
    limits = parser.add_argument_group("limits")
    for name, kind, shown, text in _LIMITS:
        limits.add_argument(f"--{name}", type=kind, metavar=shown, help=text)
    limits.add_argument(
        "--grace", type=float, default=30.0, metavar="S", help="time for running requests after SIGTERM (default: 30)"
    )
    sizes = parser.add_argument_group("sizes")
    for name, text in _SIZES:
        sizes.add_argument(f"--{name}", type=int, metavar="N", help=text)
    add_command(parser, serve)


def _add_access(group: Any) -> None:
    group.add_argument("--api-key-file", metavar="FILE", help='file of keys, one "name key" a line')
    group.add_argument("--no-auth", action="store_true", help="let other machines in without a key")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose web pages may use the server, such as https://chat.example.org; may be given repeatedly",
    )
    group.add_argument(
        "--allow-runtime-loading",
        action="store_true",
        help="have /v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters in the folder of --adapters",
    )


def _add_prompts(group: Any) -> None:
    group.add_argument("--chat-template", metavar="FILE", help="chat template in Jinja, instead of the tokenizer's own")
    group.add_argument(
        "--template", help="instead of a chat template, the prompt of instruction data: alpaca, plain or a text"
    )
    group.add_argument("--request-log", metavar="FILE", help="where each request gets a line (default: standard error)")
    group.add_argument("--log-prompts", action="store_true", help="write the prompts into these lines")


def serve(arguments: argparse.Namespace) -> ServeReport:
    """Runs mindlora serve, until SIGTERM or Ctrl-C."""
    from mindlora.serving.adapter_registry import AdapterRegistry

    settings = _settings(arguments)
    registry = AdapterRegistry(arguments.adapters, _parse_adapters(arguments.adapter))
    run = _import_run()
    # It takes seconds to import: what is wrong above is said before that.
    from mindlora.plugin.serve import build_engine

    sizes = _given(arguments, [name for name, _ in _SIZES])
    engine = build_engine(
        arguments.config, _overrides(arguments), arguments.tokenizer, registry, sizes, arguments.model_name
    )
    run(engine, settings, lambda url: print(f"mindlora: {engine.model_name} at {url}", file=sys.stderr, flush=True))
    snapshot = engine.snapshot()
    return ServeReport(engine.model_name, snapshot.prompt_tokens, snapshot.cached_tokens, snapshot.generated_tokens)


def _settings(arguments: argparse.Namespace) -> Any:
    _import_run()
    from mindlora.serving.server.settings import ServerSettings

    names = ("host", "port", "api_key_file", "no_auth", "allow_runtime_loading", "chat_template", "template")
    return ServerSettings(
        adapters_folder=arguments.adapters,
        cors_origins=tuple(arguments.cors_origin),
        request_log=arguments.request_log,
        log_prompts=arguments.log_prompts,
        grace=arguments.grace,
        **{name: getattr(arguments, name) for name in names},
        **_given(arguments, [name for name, *_ in _LIMITS]),
    )


def _import_run() -> Any:
    try:
        from mindlora.serving.server.run import run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"mindlora serve needs {error.name}, which is not installed: pip install 'mindlora[serve]'."
        ) from error
    return run


def _overrides(arguments: argparse.Namespace) -> List[str]:
    return ["--load_checkpoint", arguments.load_checkpoint] if arguments.load_checkpoint else []


def _given(arguments: argparse.Namespace, options: List[str]) -> Dict[str, Any]:
    """Returns those of the options that were given, by the names of fields."""
    fields = [option.replace("-", "_") for option in options]
    return {field: getattr(arguments, field) for field in fields if getattr(arguments, field) is not None}


def _parse_adapters(given: List[str]) -> Dict[str, str]:
    found: Dict[str, str] = {}
    for text in given:
        name, separator, path = text.partition("=")
        if not (name and separator and path):
            raise ConfigError(f"--adapter {text}: write NAME=PATH.")
        if name in found:
            raise ConfigError(f"--adapter {text}: {name} was given before.")
        found[name] = path
    return found


VERBS = (Verb("serve", "Serve a base and its adapters with OpenAI's HTTP API.", _serve_options),)
