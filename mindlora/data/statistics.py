"""Statistics of the lengths of examples: how long they are, how much of the rows is padding; and their histogram."""

import dataclasses
from typing import Optional, Sequence

import numpy as np

from mindlora.core.errors import DataError
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
        lengths = self.lengths
        total = lengths.sum()
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
    """Returns the statistics of one or more examples; ``boundary`` is None if they cannot be packed."""
    lengths = np.array([len(row.tokens) for row in examples])
    packed_rows = None
    if boundary is not None:
        packed_rows = len(best_fit([boundary.size(length) for length in lengths], boundary.capacity(seq_length)))
    # No position predicts the first token of an example.
    counted = sum(int(row.learned[1:].sum()) for row in examples)
    return LengthStatistics(lengths, seq_length + 1, counted, packed_rows)


def check_histogram(path: str) -> None:
    """Raises DataError unless ``path`` names a PNG file and matplotlib, which draws it, is installed."""
    if not path.endswith(".png"):
        raise DataError(f"The histogram {path} must end in .png.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DataError(
            "A histogram needs matplotlib, which is not installed: pip install 'mindlora[plot]', or give --stats "
            "without a file."
        ) from error


def draw_lengths(statistics: LengthStatistics, path: str) -> None:
    """Draws as a PNG how many examples have which length, and what the rows hold before and after packing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=110, width_ratios=(2, 1))
    _draw_histogram(left, statistics)
    _draw_shares(right, statistics)
    figure.tight_layout()
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _draw_histogram(axes, statistics):
    lengths = statistics.lengths
    # Bins of a whole number of tokens each, as many as are easy to tell apart.
    width = max(1, -(-int(lengths.max() - lengths.min() + 1) // 60))
    axes.hist(lengths, np.arange(lengths.min(), lengths.max() + width + 1, width) - 0.5, color="tab:blue", alpha=0.8)
    for name, value, style in (
        ("median", np.median(lengths), "-"),
        ("95th percentile", np.percentile(lengths, 95), "--"),
        ("a row", statistics.row_length, ":"),
    ):
        axes.axvline(value, color="black", linestyle=style, linewidth=1, label=f"{name}: {value:.0f}")
    axes.set_xlabel("tokens of an example")
    axes.set_ylabel("examples")
    axes.set_title(f"{len(lengths)} examples")
    axes.legend()


def _draw_shares(axes, statistics):
    shares = {"one example\nin a row": statistics.padding}
    if statistics.packed_padding is not None:
        shares["packed"] = statistics.packed_padding
    names = [f"{name}:\n{share:.1%} padding" for name, share in shares.items()]
    padding = np.array(list(shares.values()))
    axes.bar(names, 1 - padding, color="tab:blue", alpha=0.8)
    axes.bar(names, padding, bottom=1 - padding, color="lightgray")
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1)
    axes.set_title("share of the rows (gray: padding)")
