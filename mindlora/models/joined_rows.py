"""MindFormers' qkv_concat: the row order of w_qkv and w_gate_hidden.

w_qkv keeps its rows by key-value head, [heads of q that share it | k | v], and w_gate_hidden those of w1 and w3 in
turn.
"""

from typing import Tuple

import numpy as np


def join_qkv_rows(q: np.ndarray, k: np.ndarray, v: np.ndarray, kv_heads: int) -> np.ndarray:
    """Returns the rows of w_qkv.

    Args:
        q (array): Shape [heads * head_dim, ...].
        k, v (array): Shape [kv_heads * head_dim, ...].
        kv_heads (int): Number of key-value heads.

    Returns:
        array of shape [(heads + 2 * kv_heads) * head_dim, ...].
    """
    by_head = [part.reshape((kv_heads, len(part) // kv_heads) + part.shape[1:]) for part in (q, k, v)]
    return np.concatenate(by_head, axis=1).reshape((-1,) + q.shape[1:])


def split_qkv_rows(qkv: np.ndarray, kv_heads: int, head_dim: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the rows (q, k, v) of w_qkv: the reverse of join_qkv_rows."""
    by_head = qkv.reshape((kv_heads, len(qkv) // kv_heads) + qkv.shape[1:])
    parts = np.split(by_head, [by_head.shape[1] - 2 * head_dim, by_head.shape[1] - head_dim], axis=1)
    return tuple(part.reshape((-1,) + qkv.shape[1:]) for part in parts)


def join_gate_rows(gate: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Returns the rows of w_gate_hidden: those of w1 and of w3 in turn."""
    return np.stack([gate, hidden], axis=1).reshape((-1,) + gate.shape[1:])


def split_gate_rows(joined: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the rows (w1, w3) of w_gate_hidden: the reverse of join_gate_rows."""
    return np.ascontiguousarray(joined[0::2]), np.ascontiguousarray(joined[1::2])
