"""multi_lora_slot_write in NumPy: what every path must do."""

import numpy as np


def pack_adapter(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns A [r, K] and B [N, r] as one block [r, K + N]: row j is A[j, :] followed by B[:, j]."""
    return np.concatenate([a, b.T], axis=1)


def multi_lora_slot_write(
    pool: np.ndarray, ranks: np.ndarray, scales: np.ndarray, slot: int, packed: np.ndarray, scale: float
) -> None:
    """pool[slot, :r] = packed, ranks[slot] = r, scales[slot] = scale, in place. Rows from r on have no meaning.

    Args:
        pool: [slots, max_rank, K + N].
        ranks: [slots].
        scales: [slots].
        slot: The slot to write.
        packed: [r, K + N], as pack_adapter returns it.
        scale: lora_alpha / r of the adapter.
    """
    pool[slot, : len(packed)] = packed
    ranks[slot], scales[slot] = len(packed), scale
