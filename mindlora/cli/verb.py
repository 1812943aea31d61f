"""Verb: one command of ``mindlora``."""

import argparse
from typing import Any, Callable, NamedTuple


class Verb(NamedTuple):
    """One command of ``mindlora``.

    Attributes:
        name (str): What the user types.
        summary (str): One line for the help.
        add_options (callable): Takes the verb's ArgumentParser, and calls add_command on it or on parsers below it.
    """

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]


def add_command(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Any]) -> None:
    """Makes ``parser`` call ``run``, which takes the parsed arguments and returns a report."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)
