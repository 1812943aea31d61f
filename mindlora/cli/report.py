"""mindlora report: the page of a training run, or of several."""

import argparse
import dataclasses
import os
from typing import Tuple

from mindlora.cli.verb import Verb, add_command


@dataclasses.dataclass(frozen=True)
class PageReport:
    """What mindlora report wrote.

    Attributes:
        output (str): The page.
        runs (tuple of str): The folders of the runs on it.
    """

    output: str
    runs: Tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.output}: {', '.join(self.runs)}"


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.description += " It may go on meanwhile, or have been killed."
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output folder of a training run, which holds its metrics.jsonl"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the page to write (default: report.html in RUN; comparison.html in the current folder for several runs)",
    )
    add_command(parser, report)


def report(arguments: argparse.Namespace) -> PageReport:
    """Runs mindlora report."""
    from mindlora.training.report import write_report

    one = os.path.join(arguments.runs[0], "report.html") if len(arguments.runs) == 1 else "comparison.html"
    output = arguments.output or one
    write_report(arguments.runs, output)
    return PageReport(output, tuple(arguments.runs))


VERBS = (Verb("report", "Make the page of a training run, or one that compares several.", _report_options),)
