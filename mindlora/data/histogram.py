"""The histogram of the lengths of examples, as a PNG."""

import numpy as np

from mindlora.data.statistics import LengthStatistics
from mindlora.errors import DataError


def check_output(path: str) -> None:
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
    """Draws how many examples have which length, and beside it what the rows hold before and after packing.

    Args:
        statistics (LengthStatistics): As length_statistics returns it.
        path (str): The PNG file to write.
    """
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
