"""The history of a training run: metrics.jsonl, one JSON object per line, written during the run.

Every record has "step" and one of the keys in KINDS, which says what the record holds:

- "run": the configuration, versions, machine and data; the first record of a run, and of each resumption.
- "loss": one step, with the known fields of STEP_FIELDS.
- "held_out_loss": the loss on held-out data, with the other known HELD_OUT_FIELDS.
- "forgetting": the divergence from the base, in nats per token, on the base's own answers.
- "event": an action of a guard or a schedule, with "message".
- "health": a measurement of the adapter.
- "answers": a list of {"prompt", "answer"}, with "reward" if the answer was rated.
- "evaluation": results of mindlora eval: "tables" of {"title", "rows"}, rows of texts, and "verdicts", a list of texts.

JSON has neither NaN nor infinity; they are written as the texts "nan", "inf" and "-inf", which float() reads.
"""

import dataclasses
import json
import math
import os
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import DataError
from mindlora.core.json_files import parse_object
from mindlora.training.preference.settings import MEASURES

FILE_NAME = "metrics.jsonl"
EARLIER_NAME = "metrics_earlier.jsonl"
# In the order of History's fields.
KINDS = ("run", "loss", "held_out_loss", "forgetting", "event", "health", "answers", "evaluation")
# Kinds whose value is a number.
_MEASURED = ("held_out_loss", "forgetting")
# The fields of a step: seconds since 1970, the loss and so on, and the bytes sent by this rank and in use.
STEP_FIELDS = (
    "time",
    "loss",
    "learning_rate",
    "gradient_norm",
    "tokens",
    "tokens_per_second",
    "bytes_exchanged",
    "memory_bytes",
    *MEASURES,
)
HELD_OUT_FIELDS = ("held_out_loss", "held_out_accuracy", "held_out_f1", *(f"held_out_{name}" for name in MEASURES))
_NOT_FINITE = ("nan", "inf", "-inf")


class HistoryWriter:
    """Appends records to metrics.jsonl, each flushed at once, so that a killed run loses at most the last one.

    Records that an earlier run wrote after ``step`` are moved to the end of metrics_earlier.jsonl.

    Args:
        directory (str): The folder of metrics.jsonl; created if it does not exist.
        step (int, optional): The step at which this run starts: 0 for a new one, the saved step for a resumed one. None
            adds to the history of a run that has ended.

    Attributes:
        moved (int): Number of an earlier run's records that were moved.
        start (int): The byte of the file at which this run's records begin.
    """

    def __init__(self, directory: str, step: Optional[int]):
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(directory, FILE_NAME)
        self.moved = _set_aside(self.path, math.inf if step is None else step)
        self.start = os.path.getsize(self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  open during the run

    def append(self, step: int, **record: Any) -> None:
        """Writes one record of one of KINDS, such as ``append(7, held_out_loss=1.5)``."""
        self._file.write(_line({"step": step, **record}))
        self._file.flush()

    def close(self) -> None:
        """Closes the file; nothing can be appended after that."""
        self._file.close()


class HistoryReader:
    """A reader of metrics.jsonl while it is written.

    Args:
        path (str): The file.
        start (int): The byte at which to begin; a record must begin there.
    """

    def __init__(self, path: str, start: int):
        self.path = path
        self.position = start

    def records(self) -> Iterator[Tuple[str, dict]]:
        """Yields (kind, record) of each new record; a record counts as read once the next one is requested.

        Raises DataError if a record is damaged.
        """
        with open(self.path, "rb") as file:
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield _record(line.decode("utf-8"), f"{self.path} at byte {self.position}")
                self.position += len(line)


@dataclasses.dataclass
class History:
    """The content of metrics.jsonl, by kind and in the order of the file; each record has its "step".

    Attributes:
        directory (str): The folder of metrics.jsonl.
        runs (list of dict): The "run" of the first start and of each resumption.
        steps (list of dict): The training steps; an unknown value is None.
        held_out (list of dict): Measurements of "held_out_loss"; an unknown value is None.
        forgetting (list of dict): Measurements of "forgetting".
        events (list of dict): "event" and "message".
        health (list of dict): "health", as measured by AdapterHealth.
        answers (list of dict): "answers", a list of {"prompt", "answer"}.
        evaluations (list of dict): "evaluation", as written by mindlora eval.
    """

    directory: str
    runs: List[dict]
    steps: List[dict]
    held_out: List[dict]
    forgetting: List[dict]
    events: List[dict]
    health: List[dict]
    answers: List[dict]
    evaluations: List[dict]

    @property
    def last_step(self) -> int:
        """The last step with a record."""
        kinds = (getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "directory")
        return max(record["step"] for records in kinds for record in records)

    def series(self, name: str) -> Tuple[np.ndarray, np.ndarray]:
        """Returns a field's steps [n], int64, in order, and values [n], float64, as far as they are known.

        Args:
            name (str): One of STEP_FIELDS or of HELD_OUT_FIELDS, or ``forgetting``.
        """
        records = self.held_out if name in HELD_OUT_FIELDS else self.steps
        if name == "forgetting":
            records = self.forgetting
        measured = [record for record in records if record.get(name) is not None]
        measured.sort(key=lambda record: record["step"])
        steps = [record["step"] for record in measured]
        values = [record[name] for record in measured]
        return np.array(steps, np.int64), np.array(values, np.float64)


def read_history(directory: str) -> History:
    """Reads metrics.jsonl, even of an unfinished or killed run: a truncated last line is left out.

    Args:
        directory (str): The folder that holds metrics.jsonl.

    Raises:
        DataError: There is no such file, it has no complete record, or a record is damaged.
    """
    path = os.path.join(directory, FILE_NAME)
    if not os.path.isfile(path):
        raise DataError(
            f"{directory} has no {FILE_NAME}: name the output folder of a training run, or the folder that its "
            "callback RunReport writes to."
        )
    records: Dict[str, List[dict]] = {kind: [] for kind in KINDS}
    for number, line in enumerate(_complete_lines(path), 1):
        kind, record = _record(line, f"{path} line {number}")
        records[kind].append(record)
    if not any(records.values()):
        raise DataError(
            f"{path} holds no complete record: the run has not begun, or was killed before its first step. Run it "
            "again."
        )
    return History(directory, *(records[kind] for kind in KINDS))


def _set_aside(path: str, step: float) -> int:
    """Moves an earlier run's records after ``step`` (all records, if this run is new); returns their number."""
    kept = []
    later = []
    if os.path.isfile(path):
        for number, line in enumerate(_complete_lines(path), 1):
            record_step = _record(line, f"{path} line {number}")[1]["step"]
            (kept if step > 0 and record_step <= step else later).append(line + "\n")
    if later:
        with open(os.path.join(os.path.dirname(path), EARLIER_NAME), "a", encoding="utf-8") as file:
            file.writelines(later)
    # Even without ``later``: a killed run may have left half a line.
    with atomic.replace_file(path) as written, open(written, "w", encoding="utf-8") as file:
        file.writelines(kept)
    return len(later)


def _complete_lines(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line[:-1]


def _line(record: dict) -> str:
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Returns ``value`` in a form that JSON can hold: NumPy's scalars as numbers, NaN and infinity as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _record(line: str, source: str) -> Tuple[str, dict]:
    """Returns the kind of a record and the record, after checking its numbers."""
    record = parse_object(line, source, DataError)
    kinds = [kind for kind in KINDS if kind in record]
    step = record.get("step")
    if len(kinds) != 1 or not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise DataError(
            f"{source} is not a record of a training run: it needs a step and one of {', '.join(KINDS)}, but its keys "
            f"are {', '.join(record) or 'none'}. Remove the line."
        )
    fields = {"loss": STEP_FIELDS, "held_out_loss": HELD_OUT_FIELDS}
    for name in fields.get(kinds[0], kinds if kinds[0] in _MEASURED else ()):
        record[name] = _number(record.get(name), name, source)
    _check_type(record, kinds[0], source)
    return kinds[0], record


def _number(value: Any, name: str, source: str) -> Optional[float]:
    if value in _NOT_FINITE:
        return float(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise DataError(f"{source}: {name} is {value!r}, but it must be a number. Remove the line.")
    return value


def _check_type(record: dict, kind: str, source: str) -> None:
    """Raises DataError unless a record has the form that the report expects."""
    right = {
        "run": lambda: isinstance(record["run"], dict),
        "event": lambda: isinstance(record["event"], str) and isinstance(record.get("message"), str),
        "health": lambda: {"cells", "findings"} <= set(record["health"]),
        "answers": lambda: all({"prompt", "answer"} <= set(row) for row in record["answers"]),
        "evaluation": lambda: all({"title", "rows"} <= set(table) for table in record["evaluation"]["tables"]),
    }
    try:
        is_right = kind not in right or right[kind]()
    except (KeyError, TypeError):
        is_right = False
    if not is_right:
        raise DataError(f"{source}: {kind} does not hold what RunReport writes there. Remove the line.")
