"""Folds an update into a weight, W' = round(g (W + B A)), with NumPy, and checks that rounding explains the error.

There are two probes. ``fold_and_probe`` is for checkpoints, whose blocks pass through several threads at about the
speed of the disk. It reads each block as few times as it can: one row of signs, in float32, against a bound that allows
for float32 sums. ``probe_weight`` is for networks, where even an update far smaller than W must be seen to have reached
the parameter. Float32 sums would hide that, so it works in float64, with rows that respond most to the update.
"""

import functools
from typing import Iterator, Optional, Protocol, Tuple

import numpy as np

from mindlora.core.numerics.dtypes import ROUNDING, dtype_name, rounded

# Weights are folded and probed in blocks of whole rows, so that only a block is in memory as float32 or float64.
_BLOCK_ELEMENTS = 1 << 20
# Signs are random, so errors of a float32 sum of n products grow as sqrt(n); they never reach this many deviations.
_SUM_SLACK = 16 * 2.0**-24


def row_gains(weight: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Returns g = m / ||W||, [rows, 1], of W [rows, in]: the factor that gives each row the norm m, DoRA's magnitude.

    Source: Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, 2024, section 4.1.
    """
    norms = np.linalg.norm(weight, axis=1)
    # A row of zeros has no direction: its gain is not finite, and the probes detect that.
    with np.errstate(divide="ignore", invalid="ignore"):
        return (magnitude / norms).astype(np.float32)[:, None]


def fold_and_probe(
    weight: np.ndarray, b: np.ndarray, a: np.ndarray, dtype: np.dtype, magnitude: Optional[np.ndarray] = None
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Folds B A into some rows of W; compares x W'^T with g (x W^T + (x A^T) B^T) for one row x of random signs.

    ``weight``, float32 [rows, in], is overwritten; ``b``, the same rows of B times the scale, and A are float32. The
    magnitudes, float32 [rows], are DoRA's; without them g is 1. Returns the rows W' in ``dtype``; for each row
    |difference|, float64 [rows]; and its bound, float64 [rows].
    """
    signs = _signs(weight.shape[1])
    # A value too large for the dtype becomes infinite, which shows in the difference.
    with np.errstate(over="ignore", invalid="ignore"):
        expected = weight @ signs + b @ (a @ signs)
        rows, stored, gains = _fold(weight, b, a, dtype, magnitude)
        if gains is not None:
            expected = expected * gains[:, 0]
            b = b * gains
        difference = np.abs(stored @ signs - expected).astype(np.float64)
        # The elements of x are 1 or -1, so |x| drops out of the sums |x| |W'| and |x| |A|.
        size = (np.abs(stored) @ np.abs(signs)).astype(np.float64)
        added = (np.abs(b) @ np.abs(a).sum(axis=1)).astype(np.float64)
    unit, smallest = _rounding(dtype)
    return rows, difference, (unit + _SUM_SLACK) * size + 2 * _SUM_SLACK * added + smallest * weight.shape[1]


class Rows(Protocol):
    """A weight [rows, in] of which rows are read as ``[begin:end]``: an array, or one that is decoded as it is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> np.ndarray: ...


def fold_weight(
    weight: np.ndarray, b: np.ndarray, a: np.ndarray, scale: float, magnitude: Optional[np.ndarray] = None
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns W' = round(g (W + scale B A)) in the dtype of W, and g, float32 [rows, 1], which is 1 without DoRA.

    W is float32, float16 or bfloat16 [rows, in] and not changed; B [rows, r], A [r, in] and the magnitudes [rows] are
    floats.
    """
    merged = np.empty_like(weight)
    gains = np.ones((len(weight), 1), np.float32)
    a = a.astype(np.float32)
    b = np.float32(scale) * b.astype(np.float32)
    for rows in _blocks(weight):
        sizes = None if magnitude is None else magnitude[rows].astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            merged[rows], _, probes = _fold(weight[rows].astype(np.float32), b[rows], a, weight.dtype, sizes)
        if probes is not None:
            gains[rows] = probes
    return merged, gains


def probe_weight(
    weight: np.ndarray, merged: np.ndarray, b: np.ndarray, a: np.ndarray, scale: float, gains: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """Compares x W'^T with g (x W^T + scale (x A^T) B^T) in float64, for two random rows x and two in the span of A.

    Rounding changes a number by at most u times its size (u = 2^-24 in float32, 2^-11 in float16, 2^-8 in bfloat16), so
    with g W for W and g B for B, up to negligible terms,

        |difference| <= (u + 2 u32) |x| |W|^T + (u + (r + 5) u32) scale |x| |A|^T |B|^T

    W' is ``merged``, and the gains g are as fold_weight returned them. Returns |difference| and its bound, each float64
    [rows of x, rows of W].
    """
    with np.errstate(over="ignore", invalid="ignore"):
        a = a.astype(np.float64)
        b = b.astype(np.float64) * gains
        x = _rows_that_answer(a)
        x_size = np.abs(x)
        low_rank = scale * (x @ a.T)
        low_rank_size = scale * (np.abs(x) @ np.abs(a).T)
        unit, smallest = _rounding(weight.dtype)
        unit32, _ = ROUNDING["float32"]
        difference, bound = np.empty((2, len(x), len(weight)))
        for rows in _blocks(weight):
            block = weight[rows].astype(np.float64) * gains[rows]
            expected = x @ block.T + low_rank @ b[rows].T
            difference[:, rows] = np.abs(x @ merged[rows].astype(np.float64).T - expected)
            # The second unit32 is for the product with the gains.
            bound[:, rows] = (unit + 2 * unit32) * (x_size @ np.abs(block).T) + (unit + (len(a) + 5) * unit32) * (
                low_rank_size @ np.abs(b[rows]).T
            )
        # One percent more for the products of these roundings, and for float64's own.
        return difference, 1.01 * (bound + smallest * x_size.sum(axis=1, keepdims=True))


def worst_of(difference: np.ndarray, bound: np.ndarray) -> Tuple[Tuple[int, ...], bool]:
    """Returns the index of the worst difference, and whether rounding explains every one of them.

    A difference that rounding does not explain (above its bound, NaN or infinite) is worse than any that it does.
    """
    explained = np.isfinite(difference) & (difference <= bound)
    index = np.unravel_index(np.argmax(np.where(explained, difference, np.inf)), difference.shape)
    return tuple(int(i) for i in index), bool(explained.all())


def _fold(weight, b, a, dtype, magnitude) -> Tuple[np.ndarray, np.ndarray, Optional[np.ndarray]]:
    """Returns W' for float32 rows of W, which it overwrites; W' as float32; and the gains, or None without DoRA."""
    weight += b @ a
    gains = None
    if magnitude is not None:
        gains = row_gains(weight, magnitude)
        weight *= gains
    return (*rounded(weight, dtype), gains)


def _rows_that_answer(a) -> np.ndarray:
    """Returns the rows x of probe_weight, which depend on A alone."""
    # For most x, an update far smaller than W is lost in the rounding of x W^T. Linear combinations of the rows of A
    # respond to it most, and so show whether it is there.
    rng = np.random.default_rng(0)
    anywhere = rng.normal(size=(2, a.shape[1]))
    within = rng.normal(size=(2, len(a))) @ a
    return np.concatenate([anywhere, within / max(np.sqrt(np.mean(np.square(within))), 1e-30)])


def _rounding(dtype) -> Tuple[float, float]:
    """Returns the largest error of rounding to ``dtype``: relative, and absolute near zero."""
    # float64 holds a float32 sum exactly.
    return ROUNDING.get(dtype_name(dtype), (0.0, 2.0**-150))


def _blocks(weight) -> Iterator[slice]:
    count = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    return (slice(begin, begin + count) for begin in range(0, len(weight), count))


@functools.lru_cache(maxsize=8)
def _signs(count) -> np.ndarray:
    return np.where(np.random.default_rng(count).integers(0, 2, count) == 1, np.float32(1), np.float32(-1))
