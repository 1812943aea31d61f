"""lora_linear in NumPy: what every path must compute."""

import numpy as np


def lora_linear(x, w, a, b, scale, bias=None):
    """y = x W^T (+ bias) + ((x A^T) * scale) B^T, in float64.

    Args:
        x (ndarray): Shape [tokens, K].
        w (ndarray): Shape [N, K].
        a (ndarray): Shape [r, K].
        b (ndarray): Shape [N, r].
        scale (float): lora_alpha / r.
        bias (ndarray): Shape [N]. Default: None.

    Returns:
        ndarray of shape [tokens, N].
    """
    x, w, a, b = (np.asarray(array, np.float64) for array in (x, w, a, b))
    y = x @ w.T + ((x @ a.T) * scale) @ b.T
    return y if bias is None else y + np.asarray(bias, np.float64)


def lora_linear_grad(dy, x, w, a, b, scale):
    """The gradients of sum(dy * lora_linear(x, w, a, b, scale, bias)); W is frozen and gets none.

    Args:
        dy (ndarray): Shape [tokens, N].
        x, w, a, b, scale: As in lora_linear.

    Returns:
        (dx, da, db, dbias), each of the shape of its input.
    """
    dy, x, w, a, b = (np.asarray(array, np.float64) for array in (dy, x, w, a, b))
    d_low = (dy @ b) * scale
    return dy @ w + d_low @ a, d_low.T @ x, dy.T @ ((x @ a.T) * scale), dy.sum(axis=0)
