"""Steps and tokens of a run, from its batch and the number of rows in its data."""

import contextlib
import dataclasses
import os
import sqlite3
from typing import List, Optional, Tuple

from mindlora.common.yaml_file import value_at
from mindlora.plan.run import Run


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long a run trains.

    Attributes:
        rows_per_step (int): Rows in a step of the optimizer, on all devices together.
        tokens_per_step (int): Their tokens, padding included.
        epochs (int): Passes over the data.
        rows (int): Rows in the data, or None if they could not be counted.
        steps (int): Steps of the run, or None.
        tokens (int): Its tokens, padding included, or None.
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
    per_step = rows_per_step * run.seq_length
    return Schedule(rows_per_step, per_step, run.epochs, rows, steps, steps and steps * per_step, data)


def count_rows(run: Run) -> Tuple[Optional[int], str]:
    """Returns the number of rows of the training data, or None, and where they were counted or why not.

    MindSpore writes an SQLite index beside each MindRecord, which holds a line for each row.
    """
    keys = ("dataset_files", "dataset_dir")
    given = next(filter(None, (value_at(run.config, f"train_dataset.data_loader.{key}") for key in keys)), None)
    if not given:
        return None, "the YAML names no data: pass --train_dataset_dir"
    files = _records(given)
    if not files:
        return None, f"{given} holds no MindRecord"
    total = 0
    for path in files:
        rows = _rows_of(path)
        if rows is None:
            return None, f"{path} has no readable index (.db) beside it, so its rows cannot be counted"
        total += rows
    return total, f"{len(files)} MindRecord{'s' * (len(files) > 1)}"


def _records(given: object) -> List[str]:
    paths = [str(path) for path in given] if isinstance(given, (list, tuple)) else [str(given)]
    found: List[str] = []
    for path in paths:
        if os.path.isdir(path):
            found += [
                os.path.join(folder, name)
                for folder, _, names in sorted(os.walk(path))
                for name in sorted(names)
                if "mindrecord" in name and not name.endswith(".db")
            ]
        elif os.path.isfile(path):
            found.append(path)
    return found


def _rows_of(path: str) -> Optional[int]:
    index = f"{path}.db"
    if not os.path.isfile(index):
        return None
    try:
        # Read-only: what is only looked at must not change.
        with contextlib.closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as database:
            return int(database.execute("SELECT COUNT(*) FROM INDEXES").fetchone()[0])
    except (sqlite3.Error, TypeError):
        return None
