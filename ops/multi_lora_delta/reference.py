"""multi_lora_delta in NumPy: what every path must compute."""

import numpy as np


def multi_lora_delta(y0, x, pool, ranks, scales, indices):
    """y[t] = y0[t] + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t]; y[t] = y0[t] where i is negative.

    Args:
        y0 (ndarray): Shape [tokens, N].
        x (ndarray): Shape [tokens, K].
        pool (ndarray): Shape [slots, max_rank, K + N]: row j of a slot is A[j, :], then B[:, j].
        ranks (ndarray): Shape [slots]: how many rows of each slot count.
        scales (ndarray): Shape [slots].
        indices (ndarray): Shape [tokens].

    Returns:
        ndarray of shape [tokens, N], float64.
    """
    y, x = np.array(y0, np.float64), np.asarray(x, np.float64)
    for t, i in enumerate(indices):
        if i >= 0:
            block = np.asarray(pool[i][: ranks[i]], np.float64)
            a, b = block[:, : x.shape[1]], block[:, x.shape[1] :].T
            y[t] += ((x[t] @ a.T) * scales[i]) @ b.T
    return y
