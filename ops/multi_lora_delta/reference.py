"""multi_lora_delta in NumPy: what every path must compute."""

from typing import Tuple

import numpy as np


def multi_lora_delta(
    y0: np.ndarray, x: np.ndarray, pool: np.ndarray, ranks: np.ndarray, scales: np.ndarray, indices: np.ndarray
) -> np.ndarray:
    """y[t] = y0[t] + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t], in float64; y[t] = y0[t] for a negative i.

    Args:
        y0: [tokens, N].
        x: [tokens, K].
        pool: [slots, max_rank, K + N]. Row j of a slot is A[j, :] followed by B[:, j].
        ranks: [slots], the number of rows of each slot that are in use.
        scales: [slots].
        indices: [tokens], the slot of each row of x; negative for no adapter.

    Returns:
        y, [tokens, N].
    """
    y, x = np.array(y0, np.float64), np.asarray(x, np.float64)
    for t, i in enumerate(indices):
        if i >= 0:
            block = np.asarray(pool[i][: ranks[i]], np.float64)
            a, b = block[:, : x.shape[1]], block[:, x.shape[1] :].T
            y[t] += ((x[t] @ a.T) * scales[i]) @ b.T
    return y


def multi_lora_delta_grad(
    dy: np.ndarray, x: np.ndarray, pool: np.ndarray, ranks: np.ndarray, scales: np.ndarray, indices: np.ndarray
) -> Tuple[np.ndarray, ...]:
    """The gradients of sum(dy * multi_lora_delta(y0, x, pool, ranks, scales, indices)), in float64.

    Args:
        dy: [tokens, N].
        x, pool, ranks, scales, indices: As in multi_lora_delta.

    Returns:
        (dy0, dx, dpool, dscales), each of the shape of its input. Unused rows of the pool have a gradient of 0.
    """
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    dx, dpool, dscales = np.zeros(x.shape), np.zeros(pool.shape), np.zeros(len(ranks))
    for t, i in enumerate(indices):
        if i >= 0:
            block = np.asarray(pool[i][: ranks[i]], np.float64)
            a, b = block[:, : x.shape[1]], block[:, x.shape[1] :].T
            low, d_low = x[t] @ a.T, dy[t] @ b
            dx[t] = scales[i] * d_low @ a
            dpool[i, : ranks[i]] += scales[i] * np.hstack([np.outer(d_low, x[t]), np.outer(low, dy[t])])
            dscales[i] += low @ d_low
    return dy, dx, dpool, dscales
