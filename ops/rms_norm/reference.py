"""What rms_norm computes, in NumPy."""

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
