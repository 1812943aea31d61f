"""paged_attention in NumPy: what the kernel must compute."""

import numpy as np


def paged_attention(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_tables: np.ndarray,
    context_lengths: np.ndarray,
    query_lengths: np.ndarray,
) -> np.ndarray:
    """softmax(q K^T / sqrt(D)) V for each row and head, in float64.

    Args:
        query: [T, heads * D]; the rows of a sequence are together and in order.
        key_cache: [blocks, block_size, kv_heads, D].
        value_cache: [blocks, block_size, kv_heads, D].
        block_tables: [B, max_blocks].
        context_lengths: [B], tokens of each sequence, those of this step included.
        query_lengths: [B], tokens of each sequence in this step.

    Returns:
        y, [T, heads * D]. Row i of a sequence attends to positions 0 to context - queries + i.
    """
    kv_heads, size = key_cache.shape[2:]
    rows = np.asarray(query, np.float64).reshape(len(query), kv_heads, -1, size)
    out = []
    for table, context, queries in zip(block_tables, context_lengths, query_lengths):
        blocks = table[: -(-context // key_cache.shape[1])]
        keys, values = (
            np.asarray(cache[blocks], np.float64).reshape(-1, kv_heads, size)[:context]
            for cache in (key_cache, value_cache)
        )
        for length in range(context - queries + 1, context + 1):
            scores = np.einsum("kgd,jkd->kgj", rows[len(out)], keys[:length]) / np.sqrt(size)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out.append(np.einsum("kgj,jkd->kgd", weights, values[:length]).reshape(-1))
    return np.array(out).reshape(query.shape)
