"""What routed_experts computes, in NumPy."""

from typing import Tuple

import numpy as np

# A pool, its ranks and its scales.
Pairs = Tuple[np.ndarray, np.ndarray, np.ndarray]


def routed_experts(
    x: np.ndarray,
    experts: np.ndarray,
    weights: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    gate_up_pairs: Pairs,
    down_pairs: Pairs,
    slots: np.ndarray,
) -> np.ndarray:
    """y[t] = sum_j weights[t, j] D_e (silu(G_e x[t]) * (U_e x[t])) with e = experts[t, j].

    Args:
        x (array): [..., H].
        experts (array): [tokens, k], int32: the experts of each token.
        weights (array): [tokens, k]: what each one's output is multiplied by.
        gate_up (array): [experts, 2 I, H]: the rows of G, then those of U.
        down (array): [experts, H, I].
        gate_up_pairs, down_pairs (tuple): [slots, experts * max_rank, in + out], [slots] and [slots]: see adapted.
        slots (array): [at least tokens]: the slot of each token's adapter, negative for none.

    Returns:
        array [..., H], float64.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    y = np.zeros_like(rows)
    for t, chosen in enumerate(experts):
        for weight, expert in zip(weights[t], chosen):
            gate, up = np.split(adapted(gate_up, expert, gate_up_pairs, slots[t]) @ rows[t], 2)
            inner = gate / (1 + np.exp(-gate)) * up
            y[t] += weight * (adapted(down, expert, down_pairs, slots[t]) @ inner)
    return y.reshape(x.shape)


def adapted(weight: np.ndarray, expert: int, pairs: Pairs, slot: int) -> np.ndarray:
    """W + scale B A of one expert, for W [experts, out, in]: a slot holds (A, B^T) of each expert in turn."""
    pool, ranks, scales = pairs
    base = weight[expert].astype(np.float64)
    if slot < 0:
        return base
    rank = ranks[slot] // len(weight)
    rows = pool[slot, expert * rank : (expert + 1) * rank].astype(np.float64)
    a, b = rows[:, : weight.shape[2]], rows[:, weight.shape[2] :].T
    return base + scales[slot] * (b @ a)
