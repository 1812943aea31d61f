"""The report of training runs: one HTML page that needs no network, made from their metrics.jsonl."""

from typing import Sequence

from mindlora.common import atomic
from mindlora.training.history import read_history
from mindlora.training.report.page import render


def write_report(directories: Sequence[str], output: str) -> None:
    """Writes the page of one run, or one that compares several.

    Args:
        directories (sequence of str): The folder of each run that holds its metrics.jsonl.
        output (str): The HTML file to write, atomically.

    Raises:
        DataError: A folder has no metrics.jsonl, or it is damaged.
    """
    page = render([read_history(directory) for directory in directories])
    with atomic.replace_file(output) as path, open(path, "w", encoding="utf-8") as file:
        file.write(page)
