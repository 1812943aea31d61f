"""mindlora serve: an OpenAI-compatible server for one base and many adapters."""

import argparse
import dataclasses
import logging
import sys
from typing import Any, Tuple

from mindlora.cli.engine import add_engine_options, build, given_fields, log_elsewhere, read_adapters, say
from mindlora.cli.model_source import check_source, name_of_base, source_of
from mindlora.cli.verb import Verb, add_command
from mindlora.core.errors import ConfigError

# Options that are fields of ServerSettings: name, type, metavar, help.
_LIMITS: Tuple[Tuple[str, Any, str, str], ...] = (
    ("max-body-bytes", int, "N", "bytes of a request's body (default: 4 MiB)"),
    ("max-prompt-tokens", int, "N", "tokens of a prompt (default: as many as the model takes)"),
    ("max-output-tokens", int, "N", "tokens of an answer (default: as many as the model takes)"),
    ("max-choices", int, "N", "answers that one request may ask for, prompts times n (default: 64)"),
    ("key-requests", int, "N", "requests that one key may have running or waiting (default: any number)"),
    ("key-requests-per-minute", int, "N", "requests that one key may send in a minute (default: any number)"),
    ("request-seconds", float, "S", "time in which a request must be answered (default: 600)"),
    ("grace", float, "S", "time that running requests get after SIGTERM (default: 30)"),
)


@dataclasses.dataclass(frozen=True)
class ServeReport:
    """The totals of a stopped server; ``cached_tokens`` are the prompts' tokens that were in the cache."""

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
    parser.usage = "mindlora serve (--config YAML | --model FOLDER) [--adapters DIR] [more options: --help]"
    parser.description += " docs/serving.md explains everything."
    add_engine_options(parser, {"slots": "8", "max-running": "32", "max-waiting": "1024"})
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        help="what requests call the base (default: the name of the YAML's model, or of FOLDER)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 for any that is free (default: %(default)s)")
    _add_access(parser.add_argument_group("who may use it"))
    _add_prompts(parser.add_argument_group("prompts and logs"))
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME",
        help="an adapter that keeps its slot, whether it is used or not; may be given repeatedly",
    )
    limits = parser.add_argument_group("limits")
    for name, kind, metavar, text in _LIMITS:
        limits.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
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
    group.add_argument("--no-page", action="store_true", help="leave out the page for browsers at /")
    group.add_argument(
        "--allow-runtime-loading",
        action="store_true",
        help="serve /v1/load_lora_adapter and /v1/unload_lora_adapter too, for adapters in the folder of --adapters",
    )


def _add_prompts(group: Any) -> None:
    group.add_argument("--chat-template", metavar="FILE", help="chat template in Jinja, instead of the tokenizer's own")
    group.add_argument(
        "--template",
        metavar="FORM",
        help="instead of a chat template, the prompt of instruction data, for chats of one message: alpaca, plain or a "
        "text with {instruction}",
    )
    group.add_argument(
        "--request-log", metavar="FILE", help="file that gets a line for each request (default: standard error)"
    )
    group.add_argument("--log-prompts", action="store_true", help="write the prompts into these lines")


def serve(arguments: argparse.Namespace) -> ServeReport:
    """Runs mindlora serve, until SIGTERM or Ctrl-C."""
    try:
        from mindlora.serving.server.run import run
        from mindlora.serving.server.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"mindlora serve needs {error.name}, which is not installed: pip install 'mindlora[serve]'."
        ) from error
    names = ("host", "port", "api_key_file", "no_auth", "allow_runtime_loading", "log_prompts", "request_log")
    settings = ServerSettings(
        cors_origins=tuple(arguments.cors_origin),
        page=not arguments.no_page,
        chat_template=arguments.chat_template,
        template=arguments.template,
        **{name: getattr(arguments, name) for name in names},
        **given_fields(arguments, [name for name, *_ in _LIMITS]),
    )
    check_source(arguments)
    adapters = read_adapters(arguments)
    # The server also checks this for the engine's name, once the model has been loaded.
    adapters.registry.check_base_name(arguments.model_name or name_of_base(arguments))
    with log_elsewhere(arguments.verbose):

        def make_engine():
            say(f"loading {source_of(arguments)} ...")
            engine = build(arguments, adapters.registry, arguments.model_name)
            for name in arguments.pin:
                engine.adapters.pin(name)
            if not arguments.verbose:
                _log_to_stderr()
            say("compiling ...")
            return engine

        engine = run(make_engine, settings, lambda engine, url: say(f"{engine.model_name} at {url}"))
    figures = engine.snapshot()
    return ServeReport(engine.model_name, figures.prompt_tokens, figures.cached_tokens, figures.generated_tokens)


def _log_to_stderr() -> None:
    """Writes mindlora's own messages to standard error until the process ends."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("mindlora")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


VERBS = (Verb("serve", "Serve a base and its adapters with OpenAI's HTTP API.", _serve_options),)
