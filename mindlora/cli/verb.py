"""Verb: a command of ``mindlora``, or a group of them, and the options that several commands share."""

import argparse
import os
from typing import Any, Callable, NamedTuple, Sequence


class Verb(NamedTuple):
    """One command of ``mindlora``, with one line for the help.

    ``add_options`` takes the verb's ArgumentParser, and calls add_command on it or on parsers below it.
    """

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]


def group(name: str, summary: str, verbs: Sequence[Verb]) -> Verb:
    """Returns a verb that takes one of ``verbs`` behind it."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        add_verbs(parser, verbs)

    return Verb(name, summary, add_options)


def add_verbs(parser: argparse.ArgumentParser, verbs: Sequence[Verb]) -> None:
    """Makes ``parser`` take one of ``verbs``, each with its own options."""
    names = ", ".join(verb.name for verb in verbs)

    def refuse(arguments: argparse.Namespace) -> None:
        parser.error(f"VERB is missing: give one of {names}")

    parser.set_defaults(run=refuse)
    below = parser.add_subparsers(title="verbs", metavar="VERB")
    for verb in verbs:
        verb.add_options(below.add_parser(verb.name, help=verb.summary, description=verb.summary))


def quiet_transformers() -> None:
    """Keeps transformers from recommending PyTorch, which is not needed here, and another tokenizer class, on stderr.

    It must be called before transformers is imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def add_command(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Any]) -> None:
    """Makes ``parser`` call ``run``, which takes the parsed arguments and returns a report."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def add_allow_pickle(parser: argparse.ArgumentParser) -> None:
    """Adds the option that allows reading an adapter from a pickle."""
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read a .bin: it is a pickle; only tensors are taken from it and nothing in it is run",
    )


def add_target_paths(parser: argparse.ArgumentParser) -> None:
    """Adds the option that gives kohya's names their paths."""
    parser.add_argument(
        "--target-paths",
        metavar="FILE",
        help="text file with the paths of the network's cells, one in a line, for names in kohya's form that are not "
        "Stable Diffusion 1's, 2's or XL's",
    )
