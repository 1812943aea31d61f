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


def frozen_experts(x: np.ndarray, w: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """y_e = x_e W_e of x [tokens, in], W [experts * in, out] and the row after each expert's last; [tokens, out]."""
    y = np.zeros((len(x), w.shape[1]))
    for w_e, begin, end in zip(np.split(w.astype(np.float64), len(groups)), [0, *groups], groups):
        y[begin:end] = x[begin:end].astype(np.float64) @ w_e
    return y


def frozen_experts_grad(dy: np.ndarray, x: np.ndarray, w: np.ndarray, groups: np.ndarray) -> Tuple[np.ndarray]:
    """(dx,) with dx_e = dy_e W_e^T, [tokens, in]; x is not needed."""
    turned = np.concatenate([w_e.T for w_e in np.split(w, len(groups))])
    return (frozen_experts(dy, turned, groups),)


def frozen_rows(ids: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y = W[ids]; the shape of ids, and K."""
    return w[ids]
