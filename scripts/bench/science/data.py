"""What bench.py science trains on: rows of Shakespeare's plays, and of E2E's descriptions of restaurants."""

import os
from typing import List, NamedTuple, Tuple

import numpy as np

# As the base's network has them.
PAD, IGNORED = 0, -100
HELD_OUT_ROWS = 64
# Tokens of a row.
LENGTH = 128


class Rows(NamedTuple):
    """Rows for a causal language model: int32 [rows, N + 1] each; label i belongs to token i."""

    tokens: np.ndarray
    labels: np.ndarray

    def take(self, numbers: np.ndarray) -> "Rows":
        """Returns some of the rows."""
        return Rows(self.tokens[numbers], self.labels[numbers])


class Task(NamedTuple):
    """What a training learns, and the rows by which it is judged."""

    train: Rows
    held_out: Rows


def read_plays(folder: str, length: int) -> Task:
    """Returns the plays, cut into rows without a gap; the last of them are held out."""
    with open(os.path.join(folder, "tinyshakespeare.txt"), encoding="utf-8") as file:
        tokens = np.array(_tokenizer(folder).encode(file.read()).ids, np.int32)
    rows = tokens[: len(tokens) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    return _split(Rows(rows, rows), np.arange(len(rows)))


def read_e2e(folder: str, length: int) -> Task:
    """Returns E2E's pairs that a row can hold, of which the sentence counts; the last meanings are held out."""
    tokenizer = _tokenizer(folder)
    meanings: List[str] = []
    rows: List[Tuple[np.ndarray, np.ndarray]] = []
    with open(os.path.join(folder, "e2e_valid.txt"), encoding="utf-8") as file:
        for line in file:
            meaning, _, sentence = line.strip().partition("||")
            prompt = tokenizer.encode(meaning).ids
            # 2 ends a text.
            answer = [*tokenizer.encode(sentence, add_special_tokens=False).ids, 2]
            padding = length + 1 - len(prompt) - len(answer)
            if padding >= 0:
                tokens = prompt + answer + [PAD] * padding
                labels = [IGNORED] * len(prompt) + answer + [IGNORED] * padding
                rows.append((np.array(tokens, np.int32), np.array(labels, np.int32)))
                meanings.append(meaning)
    tokens, labels = map(np.stack, zip(*rows))
    return _split(Rows(tokens, labels), np.array(meanings))


def _tokenizer(folder):
    from pathlib import Path

    from tests.support import stories260k

    return stories260k.tokenizer(Path(folder) / "tok512.bin")


def _split(rows: Rows, groups: np.ndarray) -> Task:
    """Holds out the last HELD_OUT_ROWS rows; none of their group is trained on."""
    first = len(rows.tokens) - HELD_OUT_ROWS
    train = ~np.isin(groups, groups[first:])
    return Task(rows.take(np.flatnonzero(train)), rows.take(np.arange(first, len(rows.tokens))))
