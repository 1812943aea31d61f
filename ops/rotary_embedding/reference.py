"""rotary_embedding in NumPy: what the kernel must compute."""

import numpy as np


def rotary_embedding(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """y = x * cos + rotate_half(x) * sin for each head, in float64.

    Args:
        x: [T, heads * D].
        cos: [T, D].
        sin: [T, D].

    Returns:
        y, [T, heads * D].
    """
    tokens, size = cos.shape
    cos, sin = (np.asarray(table, np.float64)[:, None] for table in (cos, sin))
    heads = np.asarray(x, np.float64).reshape(tokens, x.shape[1] // size, size)
    low, high = np.split(heads, 2, axis=-1)
    return (heads * cos + np.concatenate([-high, low], axis=-1) * sin).reshape(x.shape)


def rotary_embedding_grad(dy: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """dx = dy * cos - rotate_half(dy * sin) for each head, in float64: the gradient of sum(y * dy).

    Args:
        dy: [T, heads * D], the gradient of y.
        cos, sin: As in rotary_embedding.

    Returns:
        dx, [T, heads * D].
    """
    tokens, size = cos.shape
    cos, sin = (np.asarray(table, np.float64)[:, None] for table in (cos, sin))
    heads = np.asarray(dy, np.float64).reshape(tokens, dy.shape[1] // size, size)
    low, high = np.split(heads * sin, 2, axis=-1)
    return (heads * cos - np.concatenate([-high, low], axis=-1)).reshape(dy.shape)
