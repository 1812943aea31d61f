"""Packing a step's sequences, each a prompt and an answer, into rows of one length."""

import dataclasses
from typing import Iterator, List, Tuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Sequences in rows of N tokens: sequence i occupies begins[i] to begins[i] + lengths[i] in row rows[i].

    Attributes:
        rows, begins, lengths (array): int64 [sequences].
        length (int): N.
    """

    rows: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray
    length: int

    @property
    def count(self) -> int:
        """The number of rows."""
        return int(self.rows.max()) + 1

    def batches(
        self, tokens: np.ndarray, labels: np.ndarray, coefficients: np.ndarray, size: int, ignored: int
    ) -> Iterator[Tuple[np.ndarray, ...]]:
        """Yields positions, int32 [size, N], and tokens, labels and coefficients of ``size`` rows at a time.

        Empty rows, without labels, fill up the last batch, so that one graph serves all batches.

        Args:
            tokens, labels (array): int32 [sequences, N + 1]; position i of a row predicts label i + 1.
            coefficients (array): [sequences, N], of the labels except the first.
            size (int): Rows of a batch.
            ignored (int): The label that does not count.
        """
        count = -(-self.count // size) * size
        # Places without a label that no sequence sees may hold any token.
        packed_tokens = np.pad(self._packed(tokens[:, :-1], count, 0), ((0, 0), (0, 1)))
        packed_labels = np.pad(self._packed(labels[:, 1:], count, ignored), ((0, 0), (1, 0)), constant_values=ignored)
        packed_coefficients = self._packed(coefficients.astype(np.float32), count, 0)
        positions = self.positions(count)
        for begin in range(0, count, size):
            batch = slice(begin, begin + size)
            yield positions[batch], packed_tokens[batch], packed_labels[batch], packed_coefficients[batch]

    def _packed(self, values: np.ndarray, count: int, fill: int) -> np.ndarray:
        """Returns values [sequences, N] in ``count`` rows, [count, N], with ``fill`` outside the sequences."""
        packed = np.full((count, self.length), fill, values.dtype)
        for sequence, (row, begin, length) in enumerate(zip(self.rows, self.begins, self.lengths)):
            packed[row, begin : begin + length] = values[sequence, :length]
        return packed

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """Returns each sequence's part of packed values, [count, N], as float64 [sequences, N]; 0 elsewhere."""
        values = np.zeros((len(self.rows), self.length))
        for sequence, (row, begin, length) in enumerate(zip(self.rows, self.begins, self.lengths)):
            values[sequence, :length] = packed[row, begin : begin + length]
        return values

    def positions(self, count: int) -> np.ndarray:
        """Returns each token's position in its sequence, int32 [count, N]; the rest of a row is one more sequence."""
        places = np.arange(self.length, dtype=np.int32)
        starts = np.zeros((count, self.length), np.int32)
        # Where a sequence ends, the next one or the rest begins.
        for marks in (self.begins, self.begins + self.lengths):
            inside = marks < self.length
            starts[self.rows[inside], marks[inside]] = marks[inside]
        return places - np.maximum.accumulate(starts, axis=1)


def empty_batch(size: int, length: int, ignored: int) -> Tuple[np.ndarray, ...]:
    """Returns the batch that ``batches`` would yield for ``size`` empty rows of ``length`` tokens."""
    positions = np.tile(np.arange(length, dtype=np.int32), (size, 1))
    labels = np.full((size, length + 1), ignored, np.int32)
    return positions, np.zeros_like(labels), labels, np.zeros((size, length), np.float32)


def pack_rows(lengths: np.ndarray, length: int) -> PackedRows:
    """Packs sequences by first-fit decreasing (Johnson, 1973): the longest first, each into the first row with room.

    Args:
        lengths (array): int64 [sequences], at most ``length`` each.
        length (int): Tokens of a row.
    """
    rows, begins = np.zeros_like(lengths), np.zeros_like(lengths)
    filled: List[int] = []
    for sequence in np.argsort(-lengths, kind="stable"):
        needed = int(lengths[sequence])
        row = next((row for row, taken in enumerate(filled) if taken + needed <= length), len(filled))
        if row == len(filled):
            filled.append(0)
        rows[sequence], begins[sequence] = row, filled[row]
        filled[row] += needed
    return PackedRows(rows, begins, lengths, length)


def single_rows(lengths: np.ndarray, length: int) -> PackedRows:
    """Puts each sequence into its own row; the arguments are those of pack_rows."""
    return PackedRows(np.arange(len(lengths)), np.zeros_like(lengths), lengths, length)
