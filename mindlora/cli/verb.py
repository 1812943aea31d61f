"""What a verb of the command line is made of."""

from typing import Callable, NamedTuple


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        name (str): What the user types.
        summary (str): One line for the help.
        add_options (callable): Takes the verb's ArgumentParser; sets ``run`` on it, or on the parsers it adds.
    """

    name: str
    summary: str
    add_options: Callable


def add_command(parser, run):
    """Lets ``parser`` run ``run``, which takes the parsed arguments and returns a report."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)
