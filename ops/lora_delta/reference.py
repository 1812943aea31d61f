"""lora_delta in NumPy: what every path must compute."""

from typing import Tuple

import numpy as np


def lora_delta(y0: np.ndarray, x: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """y = y0 + ((x A^T) * scale) B^T, in float64.

    Args:
        y0: [tokens, N].
        x: [tokens, K].
        a: [r, K].
        b: [N, r].
        scale: lora_alpha / r.

    Returns:
        y, [tokens, N].
    """
    y0, x, a, b = (np.asarray(array, np.float64) for array in (y0, x, a, b))
    return y0 + ((x @ a.T) * scale) @ b.T


def lora_delta_grad(
    dy: np.ndarray, x: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float
) -> Tuple[np.ndarray, ...]:
    """The gradients of sum(dy * lora_delta(y0, x, a, b, scale)), in float64.

    Args:
        dy: [tokens, N].
        x, a, b, scale: As in lora_delta.

    Returns:
        (dy0, dx, da, db, dscale), each of the shape of its input.
    """
    dy, x, a, b = (np.asarray(array, np.float64) for array in (dy, x, a, b))
    d_low = (dy @ b) * scale
    return dy, d_low @ a, d_low.T @ x, dy.T @ ((x @ a.T) * scale), np.sum((dy @ b) * (x @ a.T))
