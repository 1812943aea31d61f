"""Steps and tokens of a run, from its batch and the number of rows in its data."""

import dataclasses
import os
from typing import Optional, Sequence, Tuple, Union

from mindlora.core.formats.mindrecord_files import mindrecord_files, row_count
from mindlora.core.yaml_file import value_at
from mindlora.run.plan.run import Run


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long a run trains.

    Attributes:
        rows_per_step (int): Rows in a step of the optimizer, on all devices together.
        tokens_per_step (int): Their tokens, padding included.
        rows (int): Rows in the data, or None if they could not be counted; then steps and tokens are None too.
        tokens (int): Tokens of the run, padding included.
        data (str): Where the rows were counted, or why not.
    """

    rows_per_step: int
    tokens_per_step: int
    epochs: int
    rows: Optional[int]
    steps: Optional[int]
    tokens: Optional[int]
    data: str


def schedule_of(run: Run) -> Schedule:
    """Returns the schedule of a run that trains."""
    division = run.division
    micro_batches = division.micro_batches if division.pipeline > 1 else 1
    rows_per_step = run.rows * run.accumulation * micro_batches * division.data
    rows, data = count_rows(run)
    steps = None
    if rows is not None:
        drops = value_at(run.config, "train_dataset.drop_remainder") is not False
        steps = run.epochs * (rows // rows_per_step if drops else -(-rows // rows_per_step))
    per_step = rows_per_step * run.rows_of_model * run.seq_length
    return Schedule(rows_per_step, per_step, run.epochs, rows, steps, steps and steps * per_step, data)


def count_rows(run: Run) -> Tuple[Optional[int], str]:
    """Returns the number of rows of the training data, or None, and where they were counted or why not.

    Where adapters have data of their own, it is the longest of all data.
    """
    keys = ("dataset_files", "dataset_dir")
    source = next(filter(None, (value_at(run.config, f"train_dataset.data_loader.{key}") for key in keys)), None)
    if not source:
        return None, "the YAML names no data: pass --train_dataset_dir"
    counted = [_count(adapter.data or source) for adapter in run.adapters] or [_count(source)]
    unknown = [each for each in counted if each[0] is None]
    return unknown[0] if unknown else max(counted, key=lambda each: each[0] or 0)


def _count(source: Union[str, Sequence[str]]) -> Tuple[Optional[int], str]:
    """Returns the same for the data at one path."""
    files = list(filter(os.path.isfile, mindrecord_files(source)))
    if not files:
        return None, f"{source} holds no MindRecord"
    total = 0
    for path in files:
        rows = row_count(path)
        if rows is None:
            return None, f"{path} has no readable index (.db) beside it, so its rows cannot be counted"
        total += rows
    return total, f"{len(files)} MindRecord{'s' * (len(files) > 1)}"
