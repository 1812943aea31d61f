"""What multi_lora_linear computes, in NumPy."""

from typing import Optional

import numpy as np


def multi_lora_linear(
    x: np.ndarray,
    w: np.ndarray,
    pool: np.ndarray,
    ranks: np.ndarray,
    scales: np.ndarray,
    indices: np.ndarray,
    bias: Optional[np.ndarray] = None,
) -> np.ndarray:
    """y[t] = x[t] W^T (+ bias) + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t], and no last term for i < 0.

    Args:
        x (array): [..., K].
        w (array): [N, K].
        pool (array): [slots, max_rank, K + N]; row j of a slot is A[j, :] followed by B[:, j].
        ranks (array): [slots], int32.
        scales (array): [slots], float32.
        indices (array): [at least tokens], int32.
        bias (array): [N]. Default: None.

    Returns:
        array [..., N], float64.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    y = rows @ w.T.astype(np.float64) + (0 if bias is None else bias.astype(np.float64))
    for t, slot in enumerate(indices[: len(rows)]):
        if slot >= 0:
            block = pool[slot, : ranks[slot]].astype(np.float64)
            a, bt = block[:, : x.shape[-1]], block[:, x.shape[-1] :]
            y[t] += (rows[t] @ a.T) * scales[slot] @ bt
    return y.reshape(x.shape[:-1] + (len(w),))
