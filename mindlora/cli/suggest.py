"""mindlora suggest: the rank_pattern that a run asks for."""

import argparse
from typing import Any

from mindlora.cli.verb import Verb, add_command


def _suggest_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " From the gradients and singular values that the callback AdapterHealth recorded: cells whose update matters "
        "to the loss and has many directions get more, the others less. It prints YAML with a reason for each group."
    )
    parser.add_argument(
        "run_folder", metavar="RUN", help="output folder of a training run, which holds its metrics.jsonl"
    )
    parser.add_argument(
        "--budget", type=int, metavar="N", help="sum of the ranks of all cells (default: that of the run)"
    )
    add_command(parser, suggest)


def suggest(arguments: argparse.Namespace) -> Any:
    """Runs mindlora suggest."""
    from mindlora.training.history import read_history
    from mindlora.training.rank_suggestion import suggest_ranks

    return suggest_ranks(read_history(arguments.run_folder), arguments.budget)


VERBS = (Verb("suggest", "Suggest ranks for each cell, from a run.", _suggest_options),)
