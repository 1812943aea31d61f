"""What rms_norm and its gradients compute, in NumPy."""

from typing import Tuple

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    Args:
        x (array): [..., H].
        weight (array): [H].
        eps (float): Added to the mean.

    Returns:
        array [..., H], float64.
    """
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def rms_norm_grad(dy: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float) -> Tuple[np.ndarray, np.ndarray]:
    """The gradients of sum(y * dy), where y is what rms_norm returns.

    Args:
        dy (array): [..., H], the gradient of y.
        x, weight, eps: As in rms_norm.

    Returns:
        (dx [..., H], dweight [H]), float64.
    """
    dy, x, weight = (array.astype(np.float64) for array in (dy, x, weight))
    factor = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    scaled = dy * weight
    dx = factor * (scaled - factor**2 * x * (scaled * x).mean(-1, keepdims=True))
    return dx, (dy * x * factor).reshape(-1, x.shape[-1]).sum(0)
