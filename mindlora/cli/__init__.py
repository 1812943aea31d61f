"""The command ``mindlora VERB``: one module for related verbs, each with a table VERBS.

A verb's function imports its needs itself, so that help and usage errors are printed at once. A verb returns its
report, a dataclass whose str() is for people and whose fields ``--json`` prints for programs, or None if it has printed
everything itself, to ``arguments.stdout``. If the report has an ``exit_code``, it becomes the exit code of the command.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from typing import Iterator, Optional, Sequence, TextIO

from mindlora import __version__
from mindlora.cli import adapters, base, chat, classify, configs, data, eval, generate, rl, runs, serve, sweep
from mindlora.cli.verb import add_verbs
from mindlora.core.errors import LoraError
from mindlora.core.overrides import split_overrides

_MODULES = (data, adapters, base, configs, runs, generate, chat, classify, eval, serve, sweep, rl)
# Names of verbs before there were groups -> their names now. The next version removes them.
_EARLIER = {
    **{verb.name: ("adapter", verb.name) for verb in adapters.OF_ADAPTERS},
    **{"convert-base": ("base", "convert"), "quantize-base": ("base", "quantize"), "merge": ("base", "merge")},
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command line; returns the exit code, which is 0 only if everything was done.

    Args:
        argv (sequence of str): The arguments. Default: None, those of this process.
    """
    arguments = _parse(argv)
    try:
        # MindFormers logs to stdout, where only the report may go.
        with _stdout_for_the_report() as arguments.stdout, contextlib.redirect_stdout(sys.stderr):
            report = arguments.run(arguments)
    except LoraError as error:
        print(f"mindlora: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        path = error.filename2 or error.filename
        print(f"mindlora: error: {f'{path}: {error.strerror}' if path else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mindlora: interrupted", file=sys.stderr)
        return 130
    if report is None:
        return 0
    try:
        print(json.dumps(dataclasses.asdict(report), ensure_ascii=False) if arguments.json else report, flush=True)
    except BrokenPipeError:
        # A reader such as head has closed the pipe. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return getattr(report, "exit_code", 0)


@contextlib.contextmanager
def _stdout_for_the_report() -> Iterator[TextIO]:
    """Yields a stream to stdout, and redirects to stderr what MindSpore's libraries write to the descriptor meanwhile.

    A program that reads the report would take that for a part of it. A terminal stays as it is, for chats, and
    so does a missing stream.
    """
    stdout = sys.stdout
    if stdout is None or sys.stderr is None or stdout is not sys.__stdout__ or stdout.isatty():
        yield stdout
        return
    stdout.flush()
    kept = os.dup(stdout.fileno())
    os.dup2(2, stdout.fileno())
    try:
        with open(kept, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=False) as stream:
            yield stream
    finally:
        os.dup2(kept, stdout.fileno())
        os.close(kept)


def _parse(argv):
    """Returns the arguments; ``--a.b.c VALUE`` goes to the ``overrides`` of the verbs that take a YAML."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(_renamed(sys.argv[1:] if argv is None else argv))
    if rest and hasattr(arguments, "overrides"):
        arguments.overrides, rest = split_overrides(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _renamed(argv):
    """Returns the arguments with a verb's earlier name replaced, with a warning on stderr."""
    name = argv[0] if argv else None
    if name not in _EARLIER:
        return argv
    words = _EARLIER[name]
    print(
        f'"mindlora {name}" is called "mindlora {" ".join(words)}" now; this name goes with the next version.',
        file=sys.stderr,
    )
    return [*words, *argv[1:]]


def _parser():
    parser = argparse.ArgumentParser(
        prog="mindlora",
        description="LoRA for MindSpore, native to MindFormers.",
        epilog="mindlora-run trains: mindlora data makes the rows, mindlora configs --from FOLDER the YAML, and "
        "mindlora-run --config YAML the adapter.",
    )
    parser.add_argument("--version", action="version", version=f"mindlora {__version__}")
    add_verbs(parser, [verb for module in _MODULES for verb in module.VERBS])
    return parser
