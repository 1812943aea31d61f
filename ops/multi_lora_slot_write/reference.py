"""multi_lora_slot_write in NumPy: what every path must do."""

import numpy as np


def pack_adapter(a, b):
    """Returns A [r, K] and B [N, r] as one block [r, K + N], row j of which is A[j, :], then B[:, j]."""
    return np.concatenate([a, b.T], axis=1)


def multi_lora_slot_write(pool, ranks, scales, slot, packed, scale):
    """pool[slot, :r] = packed, ranks[slot] = r, scales[slot] = scale, in place. Rows from r on have no meaning.

    Args:
        pool (ndarray): Shape [slots, max_rank, K + N].
        ranks (ndarray): Shape [slots].
        scales (ndarray): Shape [slots].
        slot (int): Which slot.
        packed (ndarray): Shape [r, K + N].
        scale (float): lora_alpha / r of the adapter.
    """
    pool[slot, : len(packed)] = packed
    ranks[slot], scales[slot] = len(packed), scale
