"""kv_cache_write in NumPy: what the kernel must do."""

import numpy as np


def kv_cache_write(
    key: np.ndarray, value: np.ndarray, key_cache: np.ndarray, value_cache: np.ndarray, slot_mapping: np.ndarray
) -> int:
    """key_cache.reshape(-1, kv_heads * D)[slot_mapping[t]] = key[t], and the same for values, in place.

    Args:
        key: [T, kv_heads * D].
        value: [T, kv_heads * D].
        key_cache: [blocks, block_size, kv_heads, D].
        value_cache: [blocks, block_size, kv_heads, D].
        slot_mapping: [T]; a token with a negative slot is not written.

    Returns:
        How many tokens were written.
    """
    written = slot_mapping >= 0
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.reshape(-1, rows.shape[1])[slot_mapping[written]] = rows[written]
    return int(written.sum())
