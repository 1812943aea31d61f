"""The report of training runs: one offline HTML page, built from their metrics.jsonl."""

from typing import Any, Sequence

from mindlora.core import atomic
from mindlora.training.report.history import read_history
from mindlora.training.report.page import render


def write_report(directories: Sequence[str], output: str, comparisons: Sequence[Any] = ()) -> None:
    """Writes the page of one run, or a page that compares several runs.

    Args:
        directories (sequence of str): The folder of each run that holds its metrics.jsonl.
        output (str): The HTML file to write, atomically.
        comparisons (sequence of Comparison): Comparisons of the runs on held-out rows. Default: ().

    Raises:
        DataError: A folder has no metrics.jsonl, or it is damaged.
    """
    page = render([read_history(directory) for directory in directories], comparisons)
    with atomic.replace_file(output) as path, open(path, "w", encoding="utf-8") as file:
        file.write(page)
