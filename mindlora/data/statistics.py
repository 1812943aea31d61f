"""What the lengths of examples mean for training: how long they are, and how much of the rows is padding."""

import dataclasses
from typing import Optional, Sequence

import numpy as np

from mindlora.data.conversion import Encoded
from mindlora.data.packing import Boundary, best_fit


@dataclasses.dataclass(frozen=True)
class LengthStatistics:
    """Lengths of examples, and what share of the rows is padding.

    Attributes:
        lengths (numpy.ndarray): Tokens of each example, int64 [examples].
        row_length (int): Tokens of a row, seq_length + 1.
        counted (int): Tokens that count in the loss.
        packed_rows (int or None): Rows that the examples fill when they are packed; None if they cannot be.
    """

    lengths: np.ndarray
    row_length: int
    counted: int
    packed_rows: Optional[int]

    @property
    def padding(self) -> float:
        """Share of the positions that no example fills, with one example in a row."""
        return 1 - self.lengths.sum() / (len(self.lengths) * self.row_length)

    @property
    def packed_padding(self) -> Optional[float]:
        """The same when the examples are packed, padding between them included."""
        return None if self.packed_rows is None else 1 - self.lengths.sum() / (self.packed_rows * self.row_length)

    def __str__(self):
        lengths, total = self.lengths, self.lengths.sum()
        lines = [
            f"lengths of {len(lengths)} examples: min {lengths.min()}, median {np.median(lengths):g}, "
            f"mean {lengths.mean():.1f}, 95th percentile {np.percentile(lengths, 95):.0f}, max {lengths.max()} tokens",
            f"counted in the loss: {self.counted} of {total} tokens ({self.counted / total:.1%})",
            f"padding with one example in a row: {self.padding:.1%} of {len(lengths)} rows",
        ]
        if self.packed_rows is None:
            lines.append("padding with packed rows: these examples cannot be packed, and --pack says why")
        else:
            lines.append(f"padding with packed rows: {self.packed_padding:.1%} of {self.packed_rows} rows")
        return "\n".join(lines)


def length_statistics(examples: Sequence[Encoded], seq_length: int, boundary: Optional[Boundary]) -> LengthStatistics:
    """Returns the statistics of some examples.

    Args:
        examples (sequence of Encoded): At least one, of at most seq_length + 1 tokens each.
        seq_length (int): seq_length of the model.
        boundary (Boundary or None): As find_boundary returns it; None if the examples cannot be packed.
    """
    lengths = np.array([len(row.tokens) for row in examples])
    packed_rows = None
    if boundary is not None:
        packed_rows = len(best_fit([boundary.size(length) for length in lengths], boundary.capacity(seq_length)))
    # No position predicts the first token of an example.
    counted = sum(int(row.learned[1:].sum()) for row in examples)
    return LengthStatistics(lengths, seq_length + 1, counted, packed_rows)
