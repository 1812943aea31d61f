"""What frozen_linear computes, in NumPy."""

from typing import Tuple

import numpy as np


def rounded(values: np.ndarray) -> np.ndarray:
    """Returns float32 numbers rounded to bfloat16, ties to even; float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def frozen_linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y = x W^T of x [tokens, K] and W [N, K]; float64 [tokens, N]."""
    return x.astype(np.float64) @ w.astype(np.float64).T


def frozen_linear_grad(dy: np.ndarray, x: np.ndarray, w: np.ndarray) -> Tuple[np.ndarray]:
    """(dx,) with dx = dy W, float64 [tokens, K]; x is not needed."""
    return (dy.astype(np.float64) @ w.astype(np.float64),)


def frozen_linear_rounded(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y = bf16(x) W^T."""
    return frozen_linear(rounded(x), w)


def frozen_linear_rounded_grad(dy: np.ndarray, x: np.ndarray, w: np.ndarray) -> Tuple[np.ndarray]:
    """(dx,) with dx = bf16(dy) W."""
    return frozen_linear_grad(rounded(dy), x, w)


def frozen_rows(ids: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y = W[ids]; the shape of ids, and K."""
    return w[ids]
