"""The leading part of a singular value decomposition, from random directions."""

from typing import Tuple

import numpy as np

# Random directions beyond the rank; a few make the error small.
_OVERSAMPLING = 8


def randomized_svd(matrix: np.ndarray, rank: int, iterations: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (U, S, V^T) of W projected onto the range of (W W^T)^iterations W X, with X random directions.

    They hold the ``rank`` leading singular values and vectors, and a few more. Each call draws the same X.

    Args:
        matrix (array): W [rows, columns], float32 or float64.
        rank (int): At most the smaller side of W.
        iterations (int): More make it more exact: 4 are usual, 16 nearly exact.

    Source: Halko et al., Finding Structure with Randomness, 2011.
    """
    if matrix.shape[0] < matrix.shape[1]:
        u, s, vt = randomized_svd(matrix.T, rank, iterations)
        return vt.T, s, u.T
    directions = min(rank + _OVERSAMPLING, *matrix.shape)
    rng = np.random.default_rng(0)
    q = np.linalg.qr(matrix @ rng.standard_normal((matrix.shape[1], directions), np.float32))[0]
    for _ in range(iterations):
        q = np.linalg.qr(matrix.T @ q)[0]
        q = np.linalg.qr(matrix @ q)[0]
    u, s, vt = np.linalg.svd(q.T @ matrix, full_matrices=False)
    return q @ u, s, vt
