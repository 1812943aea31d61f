"""What a run needs to know of its data: how many rows there are, and how many tokens one has."""

import dataclasses
import math
import os
from typing import Optional

from mindlora.core.errors import ConfigError
from mindlora.core.formats.mindrecord_files import mindrecord_files, row_count
from mindlora.data.pipeline import held_out_name
from mindlora.run.checks.data_rows import FirstRows
from mindlora.training.preference.rules import ANSWERS

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
