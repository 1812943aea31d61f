"""Principal components of rows that come batch by batch, in NumPy."""

from typing import Optional, Tuple

import numpy as np

# The leading part of a singular value decomposition, from random directions.

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


# The randomized decomposition takes the place of the exact one where that would be several times slower.
_ITERATIONS = 4
_FEW = 4


class PrincipalComponents:
    """The leading principal components of all rows so far, from a decomposition of each batch.

    With S V the components of the rows before, each times its singular value, n their number and m their mean, those of
    a batch X of k rows with mean x are the leading right singular vectors of [S V; X - x; sqrt(n k / (n + k)) (m - x)].

    Source: Ross et al., Incremental Learning for Robust Visual Tracking, 2008, as in scikit-learn's IncrementalPCA.

    Args:
        count (int): How many components, at least 1.

    Attributes:
        components (array): float32 [count, features], the strongest first; None before the first batch. The largest
            element of each is positive.
        explained (array): float64 [count], which share of the variance of all rows each explains; None before.
    """

    def __init__(self, count: int):
        self.count = count
        self.components: Optional[np.ndarray] = None
        self.explained: Optional[np.ndarray] = None
        self._singular_values = np.zeros(0)
        self._mean = np.zeros(0)
        self._variance = np.zeros(0)
        self._rows = 0

    def update(self, rows: np.ndarray) -> None:
        """Takes a batch of float32 [k, features] in, with k and features at least ``count``."""
        batch = rows.astype(np.float64)
        mean, variance, number = batch.mean(axis=0), batch.var(axis=0), len(batch)
        batch -= mean
        if self.components is None:
            self._mean = self._variance = np.zeros_like(mean)
        else:
            before = self._singular_values[:, None] * self.components
            shift = np.sqrt(self._rows * number / (self._rows + number)) * (self._mean - mean)
            batch = np.vstack([before, batch, shift])
        total = self._rows + number
        old_share, new_share = self._rows / total, number / total
        spread = old_share * new_share * (self._mean - mean) ** 2
        self._variance = old_share * self._variance + new_share * variance + spread
        self._mean = old_share * self._mean + new_share * mean
        self._rows = total
        if _FEW * self.count < min(batch.shape):
            _, values, vectors = randomized_svd(batch, self.count, _ITERATIONS)
        else:
            _, values, vectors = np.linalg.svd(batch, full_matrices=False)
        vectors = vectors[: self.count]
        largest = vectors[np.arange(len(vectors)), np.abs(vectors).argmax(axis=1)]
        self.components = (vectors * np.sign(largest)[:, None]).astype(np.float32)
        self._singular_values = values[: self.count]
        whole = self._variance.sum() * total
        self.explained = self._singular_values**2 / whole if whole > 0 else np.zeros(len(vectors))
