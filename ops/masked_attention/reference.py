"""What masked_attention and its gradient compute, in NumPy."""

from typing import Tuple

import numpy as np


def masked_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float) -> np.ndarray:
    """y = softmax(scale * q k^T + mask) v for each head.

    Args:
        q (array): [B, T, N, D].
        k, v (array): [B, T, M, D], where N is a multiple of M: N / M heads of q in a row share one of k and v.
        mask (array): [B, 1, T, T], added to the scores.
        scale (float): Factor of the scores.

    Returns:
        array [B, T, N, D], float64.
    """
    q, k, v = of_heads(q, k, v)
    return np.einsum("bnqk,bknd->bqnd", weights(q, k, mask, scale), v)


def masked_attention_grad(
    dy: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float
) -> np.ndarray:
    """The gradients of sum(y * dy), where y is what masked_attention returns.

    Args:
        dy (array): [B, T, N, D], the gradient of y.
        q, k, v, mask, scale: As in masked_attention.

    Returns:
        array [B, T, N + 2 M, D], float64: the heads of dq, of dk and of dv.
    """
    groups = k.shape[:3] + (-1, k.shape[3])
    q, k, v = of_heads(q, k, v)
    p = weights(q, k, mask, scale)
    dp = np.einsum("bqnd,bknd->bnqk", dy, v)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    dq = np.einsum("bnqk,bknd->bqnd", ds, k)
    dk = np.einsum("bnqk,bqnd->bknd", ds, q).reshape(groups).sum(3)
    dv = np.einsum("bnqk,bqnd->bknd", p, dy).reshape(groups).sum(3)
    return np.concatenate([dq, dk, dv], axis=2)


def of_heads(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Tuple[np.ndarray, ...]:
    """Returns q, k and v in float64, k and v once for each head of q."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    return q, k.repeat(group, axis=2), v.repeat(group, axis=2)


def weights(q: np.ndarray, k: np.ndarray, mask: np.ndarray, scale: float) -> np.ndarray:
    """Returns softmax(scale * q k^T + mask), [B, N, T, T]."""
    scores = scale * np.einsum("bqnd,bknd->bnqk", q, k) + mask
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)
