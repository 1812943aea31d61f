"""paged_attention in NumPy: what the kernel must compute."""

import numpy as np


def paged_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_tables: np.ndarray,
    context_lengths: np.ndarray,
    query_lengths: np.ndarray,
) -> np.ndarray:
    """Writes turned keys and values to the caches, and attends over them in float64.

    Args:
        query: [T, heads * D]; the rows of a sequence are together and in order.
        key: [T, kv_heads * D].
        value: [T, kv_heads * D].
        cos: [T, D], of the position of each row.
        sin: [T, D].
        key_cache: [blocks, block_size, kv_heads, D]; written in place.
        value_cache: [blocks, block_size, kv_heads, D]; written in place.
        block_tables: [B, max_blocks].
        context_lengths: [B], tokens of each sequence, those of this step included.
        query_lengths: [B], tokens of each sequence in this step.

    Returns:
        y, [T, heads * D]: softmax(q K^T / sqrt(D)) V for each row and head. Row i of a sequence is at position
        context - queries + i, and attends to positions up to its own.
    """
    block_size, kv_heads, size = key_cache.shape[1:]
    rows = turned(query, cos, sin).reshape(len(query), kv_heads, -1, size)
    new_keys = turned(key, cos, sin).reshape(-1, kv_heads, size)
    new_values = value.reshape(-1, kv_heads, size)
    out = []
    for table, context, queries in zip(block_tables, context_lengths, query_lengths):
        positions = np.arange(context)
        places = table[positions // block_size] * block_size + positions % block_size
        caches = key_cache.reshape(-1, kv_heads, size), value_cache.reshape(-1, kv_heads, size)
        for cache, new in zip(caches, (new_keys, new_values)):
            cache[places[context - queries :]] = new[len(out) : len(out) + queries]
        keys, values = (np.asarray(cache[places], np.float64) for cache in caches)
        for length in range(context - queries + 1, context + 1):
            scores = np.einsum("kgd,jkd->kgj", rows[len(out)], keys[:length]) / np.sqrt(size)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out.append(np.einsum("kgj,jkd->kgd", weights, values[:length]).reshape(-1))
    return np.array(out).reshape(query.shape)


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x * cos + rotate_half(x) * sin for each head of x [T, heads * D], in float64."""
    heads = np.asarray(x, np.float64).reshape(len(x), -1, cos.shape[1])
    low, high = np.split(heads, 2, axis=-1)
    rotated = np.concatenate([-high, low], axis=-1)
    return (heads * cos[:, None] + rotated * sin[:, None]).reshape(x.shape)
