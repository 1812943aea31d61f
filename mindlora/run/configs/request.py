"""What a run is asked to be: device, data, recipe; what follows for its rows; and what cannot be."""

import dataclasses
import math
import os
from typing import Any, Optional, Sequence

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number
from mindlora.core.formats.mindrecord_files import mindrecord_files, row_count
from mindlora.data.pipeline import held_out_name
from mindlora.run.checks.data_rows import FirstRows
from mindlora.run.configs.folder import ModelFolder
from mindlora.run.configs.model import CPU, NPU
from mindlora.training.preference.rules import ANSWERS

# What a run needs to know of its data: how many rows there are, and how many tokens one has.

_ENDING = ".mindrecord"


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a MindRecord, or of a folder of them.

    Attributes:
        count (int): How many there are.
        tokens (int): Tokens of each, of a pair of answers that is not packed those of either.
        of_model (int): How many rows of the model each is: 2 where it is a pair of answers that is not packed.
        loss (str): The loss for such preferences, or None where the rows have labels.
        held_out (str): The MindRecord of held-out rows that `mindlora data --holdout` wrote beside it, or None.
    """

    path: str
    count: int
    tokens: int
    of_model: int
    loss: Optional[str]
    held_out: Optional[str]


def read_rows(path: str, first_rows: FirstRows) -> Rows:
    """Returns what a MindRecord, or a folder of them, holds; ``first_rows`` reads the first rows of one.

    Raises ConfigError if there is none, it cannot be read, or its rows have no input_ids.
    """
    files = [file for file in mindrecord_files(path) if file.endswith(_ENDING) and os.path.isfile(file)]
    if not files:
        raise ConfigError(
            f"--data {path} is no MindRecord, and no folder of them. Convert your rows first: mindlora data alpaca "
            "--input rows.jsonl --output rows.mindrecord --tokenizer FOLDER --seq-length N"
        )
    counts = [row_count(file) for file in files]
    row = next(first_rows(files[0], 1), {})
    if None in counts or "input_ids" not in row:
        lacking = f"no column input_ids in {files[0]}" if None not in counts else "a MindRecord without its .db"
        raise ConfigError(f"--data {path}: there is {lacking}. Convert the data again.")
    held_out = held_out_name(path)
    exists = path.endswith(_ENDING) and os.path.isfile(held_out)
    *of_model, tokens = row["input_ids"].shape
    loss = ("dpo" if "pairs" in row else "kto") if ANSWERS in row else None
    count = sum(filter(None, counts))
    return Rows(path, count, tokens, math.prod(of_model), loss, held_out if exists else None)


EPOCHS = 3
# Rows of a step: many enough that its gradient is not an accident, few enough that small data has many steps.
_ROWS_PER_STEP = 16
_BATCH = {CPU: 1, NPU: 4}
_SAVE_STEPS = 500


@dataclasses.dataclass(frozen=True)
class Request:
    """What a run is asked to be.

    Attributes:
        output (str): Where its YAML will be, for the commands in its header.
        device (str): "cpu" or "npu".
        devices (int): How many there are.
        seq_length (int): Tokens of a row. Default: None, those of ``rows``, or 2048 if the model takes as many.
        recipe (str): One of config.PRESETS. Default: None.
        rows (Rows): The data. Default: None.
        prompts (str): A file of prompts, whose answers are rated, in the place of data. Default: None.
        rewards (sequence of str): What rates them, as rl.reward_funcs takes it. Default: none.
        teacher (str or dict): Whose log-probabilities of them the run learns, as rl.teacher takes it. Default: None.
    """

    output: str
    device: str
    devices: int = 1
    seq_length: Optional[int] = None
    recipe: Optional[str] = None
    rows: Optional[Rows] = None
    prompts: Optional[str] = None
    rewards: Sequence[str] = ()
    teacher: Any = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a step, and how many steps a run has.

    Attributes:
        rows (int): Rows on each device at a time.
        accumulation (int): So many of these make a step.
        per_step (int): Rows of a step on all devices.
        per_epoch (int): Steps of an epoch, or None without data.
    """

    rows: int
    accumulation: int
    per_step: int
    per_epoch: Optional[int]

    @classmethod
    def of(cls, request: Request) -> "Batch":
        """Returns the batch of a run."""
        available = request.rows.count if request.rows else _ROWS_PER_STEP * request.devices
        of_model = request.rows.of_model if request.rows else 1
        rows = max(1, min(_BATCH[request.device] // of_model, available // request.devices))
        # On several devices, a batch of 4 rows on each is enough.
        accumulation = max(1, min(_ROWS_PER_STEP, available) // rows) if request.devices == 1 else 1
        per_step = rows * accumulation * request.devices
        return cls(rows, accumulation, per_step, request.rows.count // per_step if request.rows else None)

    @property
    def steps(self) -> Optional[int]:
        """Steps of the run, or None without data."""
        return None if self.per_epoch is None else self.per_epoch * EPOCHS

    @property
    def save_steps(self) -> int:
        """Steps between two saves."""
        return _SAVE_STEPS if self.per_epoch is None else min(_SAVE_STEPS, max(1, self.per_epoch))


def check_request(folder: ModelFolder, request: Request) -> None:
    """Raises ConfigError if the model cannot be trained so."""
    check_number(request.devices, "--devices", COUNT)
    if request.seq_length is not None:
        check_number(request.seq_length, "--seq-length", COUNT)
    if request.rows and request.seq_length not in (None, row_length(folder, request.rows)):
        raise ConfigError(
            f"--seq-length is {request.seq_length}, and the rows of {request.rows.path} have {request.rows.tokens} "
            f"tokens, which are of seq_length {row_length(folder, request.rows)}. Leave it out."
        )
    if bool(request.prompts) != bool(request.rewards or request.teacher):
        raise ConfigError(
            "A run that learns from its own answers has prompts, and rewards or a teacher. Give --prompts, and "
            "--rewards or --teacher."
        )
    if request.prompts and (request.rows or request.devices > 1):
        what = f"--data {request.rows.path}" if request.rows else f"--devices {request.devices}"
        raise ConfigError(f"A run that learns from rewards has prompts for its data, and one device. Leave {what} out.")
    if request.device == CPU and request.devices > 1:
        raise ConfigError(
            f"--devices is {request.devices}, and MindSpore divides nothing among CPU processes. Use one."
        )
    if request.rows and request.rows.count < request.devices:
        raise ConfigError(
            f"{request.rows.path} has {request.rows.count} rows, too few for {request.devices} devices. Give more data."
        )


def row_length(folder: ModelFolder, rows: Rows) -> int:
    """Returns the seq_length that the rows are of."""
    return rows.tokens if folder.architecture.takes_shifted_labels else rows.tokens - 1
