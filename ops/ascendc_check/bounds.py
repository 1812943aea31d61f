"""How near to its reference a right result is: for each of its numbers the lowest and the highest that will do.

golden.py and scripts/verify_npu_operators.py judge by this. It needs NumPy alone.

A right result differs from the reference, which is in float64, by two things. Sums are float32, in any order: their
error grows with the sum of the magnitudes of what is added. And numbers are rounded where ops/<operator>/README.md says
so: y once, and on the cube cores the rank-r tensor (x A^T) * scale once before it meets B. The plan chooses the cores,
so a result is right with the rank-r tensor as it is and with it rounded. Between these two lies little, so a number
that is rounded once too often is found, as are a missing term and a wrong neighbour.
"""

from typing import Any, Sequence, Tuple

import numpy as np

# The largest error of rounding a number to a dtype once: relative to it, and near zero.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST = {"float32": 2.0**-149, "float16": 2.0**-25, "bfloat16": 2.0**-134}
# The error of a float32 sum in any order, relative to the sum of the magnitudes. Errors of random terms cancel: sums of
# thousands of them on a CPU stay below 5 roundings. No document says that the cube cores round to nearest as they add:
# cut off after every 16 of 2048 terms, a sum is off by 8 roundings at most. A missing term is off by far more.
SUMS = 64 * 2.0**-24

# The lowest and the highest numbers; NaN or an infinity where a result must not be finite.
Span = Tuple[np.ndarray, np.ndarray]


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns an array as it is stored: bfloat16, which NumPy lacks, as the upper halves of float32."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded_bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded_bits).astype(np.uint16)


def held(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the values that an array has once it is stored, as float64."""
    stored = store(values, dtype)
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def exact(values: np.ndarray) -> Span:
    """Returns the span in which no bit may differ."""
    return values, values


def rounded(values: np.ndarray, sums: np.ndarray, dtype: str, steps: Any = 0.0) -> Span:
    """Returns the span of float32 sums that are rounded to a dtype once.

    Args:
        values (ndarray): The reference.
        sums (ndarray): The same with the magnitudes of all that is added up.
        dtype (str): A name in ROUNDING.
        steps (ndarray or float): The magnitudes of what is rounded to the dtype on the way. Default: 0.

    Returns:
        Span.
    """
    error = SUMS * sums + ROUNDING[dtype] * steps
    return _rounded_once(values - error, values + error, dtype)


def low_rank(
    wanted: np.ndarray,
    rest: np.ndarray,
    x: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale: float,
    dtype: str,
    kept: Sequence[str] = (),
) -> Span:
    """Returns the span of y = rest + ((x A^T) * scale) B^T, rounded to a dtype once.

    Args:
        wanted (ndarray): y by the reference, [tokens, N].
        rest (ndarray): The magnitudes of all that the rest adds up, [tokens, N].
        x, a, b (ndarray): [tokens, K], [r, K] and [N, r].
        scale (float): lora_alpha / r.
        dtype (str): A name in ROUNDING.
        kept (sequence of str): The dtypes in which the rank-r tensor may be kept. Default: float32 and ``dtype``.

    Returns:
        Span, which holds what is right with any of ``kept``.
    """
    x, a, b = (np.asarray(array, np.float64) for array in (x, a, b))
    low, error = x @ a.T * scale, SUMS * (np.abs(x) @ np.abs(a).T * abs(scale))
    lowest, highest = np.full(wanted.shape, np.inf), np.full(wanted.shape, -np.inf)
    for of_low in kept or ("float32", dtype):
        # Where the error crosses the middle between two numbers of the dtype, either of them is right.
        ends = (low - error, low + error)
        below, above = ends if of_low == "float32" else (held(end, of_low) for end in ends)
        middle, half = (above + below) / 2, (above - below) / 2
        y = wanted + (middle - low) @ b.T
        allowed = half @ np.abs(b).T + SUMS * (rest + np.abs(middle) @ np.abs(b).T)
        lowest, highest = np.minimum(lowest, y - allowed), np.maximum(highest, y + allowed)
    return _rounded_once(lowest, highest, dtype)


def of_slots(
    wanted: np.ndarray,
    y0: np.ndarray,
    x: np.ndarray,
    pool: np.ndarray,
    ranks: np.ndarray,
    scales: np.ndarray,
    indices: np.ndarray,
    dtype: str,
    kept: Sequence[str] = (),
) -> Span:
    """Returns the span of multi_lora_delta; a row without an adapter must be that of the reference to the last bit.

    Args:
        wanted (ndarray): y by the reference, [tokens, N].
        y0, x, pool, ranks, scales, indices (ndarray): As in ops/multi_lora_delta/reference.py.
        dtype, kept: As in low_rank.

    Returns:
        Span.
    """
    lowest, highest = wanted.copy(), wanted.copy()
    for slot in np.unique(indices):
        if not 0 <= slot < len(ranks) or not ranks[slot]:
            continue
        rows, block = indices == slot, pool[slot, : ranks[slot]]
        a, b = block[:, : x.shape[1]], block[:, x.shape[1] :].T
        lowest[rows], highest[rows] = low_rank(wanted[rows], np.abs(y0[rows]), x[rows], a, b, scales[slot], dtype, kept)
    return lowest, highest


def wrong(found: np.ndarray, span: Span) -> np.ndarray:
    """Returns where a result is outside of its span, or finite where it must not be."""
    lowest, highest = span
    finite = np.isfinite(lowest) & np.isfinite(highest)
    with np.errstate(invalid="ignore"):
        inside = (found >= lowest) & (found <= highest)
    return np.where(finite, ~inside, np.isfinite(found))


def text(span: Span, at: Tuple[int, ...]) -> str:
    """Returns what is right at an index, in words."""
    lowest, highest = (float(end[at]) for end in span)
    return f"{lowest:.9g}" if lowest == highest or not np.isfinite(lowest) else f"{lowest:.9g} to {highest:.9g}"


def _rounded_once(lowest: np.ndarray, highest: np.ndarray, dtype: str) -> Span:
    """Returns a span with room for one rounding to nearest."""
    share, least = 1.001 * ROUNDING[dtype], LEAST[dtype]
    return lowest - share * np.abs(lowest) - least, highest + share * np.abs(highest) + least
