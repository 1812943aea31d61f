"""lora_linear in NumPy: what every path must compute."""

from typing import Optional, Tuple

import numpy as np


def lora_linear(
    x: np.ndarray, w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, bias: Optional[np.ndarray] = None
) -> np.ndarray:
    """y = x W^T (+ bias) + ((x A^T) * scale) B^T, in float64.

    Args:
        x: [tokens, K].
        w: [N, K].
        a: [r, K].
        b: [N, r].
        scale: lora_alpha / r.
        bias: [N].

    Returns:
        y, [tokens, N].
    """
    x, w, a, b = (np.asarray(array, np.float64) for array in (x, w, a, b))
    y = x @ w.T + ((x @ a.T) * scale) @ b.T
    return y if bias is None else y + np.asarray(bias, np.float64)


def lora_linear_grad(
    dy: np.ndarray, x: np.ndarray, w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float
) -> Tuple[np.ndarray, ...]:
    """The gradients of sum(dy * lora_linear(x, w, a, b, scale, bias)), in float64. W is frozen and has none.

    Args:
        dy: [tokens, N].
        x, w, a, b, scale: As in lora_linear.

    Returns:
        (dx, da, db, dbias), each of the shape of its input.
    """
    dy, x, w, a, b = (np.asarray(array, np.float64) for array in (dy, x, w, a, b))
    d_low = (dy @ b) * scale
    return dy @ w + d_low @ a, d_low.T @ x, dy.T @ ((x @ a.T) * scale), dy.sum(axis=0)
