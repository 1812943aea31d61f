"""What rounded_linear computes, in NumPy."""

from typing import Optional

import numpy as np


def rounded(values: np.ndarray) -> np.ndarray:
    """Returns float32 numbers rounded to bfloat16, ties to even; float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def rounded_linear(
    x: np.ndarray,
    w: np.ndarray,
    pool: np.ndarray,
    ranks: np.ndarray,
    scales: np.ndarray,
    indices: np.ndarray,
    bias: Optional[np.ndarray] = None,
) -> np.ndarray:
    """y[t] = bf16(x[t]) bf16(W)^T (+ bias) + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t], bf16 rounding.

    Args:
        x (array): [..., K].
        w (array): [N, K]; for a W in NF4 what it decodes to.
        pool (array): [slots, max_rank, K + N]; row j of a slot is A[j, :] followed by B[:, j].
        ranks (array): [slots], int32.
        scales (array): [slots], float32.
        indices (array): [at least tokens], int32.
        bias (array): [N]. Default: None.

    Returns:
        array [..., N], float64.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = rounded(rows).astype(np.float64) @ rounded(w).T.astype(np.float64)
    y += 0 if bias is None else bias.astype(np.float64)
    for t, slot in enumerate(indices[: len(rows)]):
        if slot >= 0:
            block = pool[slot, : ranks[slot]].astype(np.float64)
            a, bt = block[:, : x.shape[-1]], block[:, x.shape[-1] :]
            y[t] += (rows[t].astype(np.float64) @ a.T) * scales[slot] @ bt
    return y.reshape(x.shape[:-1] + (len(w),))
