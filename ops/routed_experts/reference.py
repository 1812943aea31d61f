"""What routed_experts computes, in NumPy."""

import numpy as np


def routed_experts(
    x: np.ndarray, experts: np.ndarray, weights: np.ndarray, gate_up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    """y[t] = sum_j weights[t, j] D_e (silu(G_e x[t]) * (U_e x[t])) with e = experts[t, j].

    Args:
        x (array): [..., H].
        experts (array): [tokens, k], int32: the experts of each token.
        weights (array): [tokens, k]: what each one's output is multiplied by.
        gate_up (array): [experts, 2 I, H]: the rows of G, then those of U.
        down (array): [experts, H, I].

    Returns:
        array [..., H], float64.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    y = np.zeros_like(rows)
    for t, chosen in enumerate(experts):
        for weight, expert in zip(weights[t], chosen):
            gate, up = np.split(gate_up[expert].astype(np.float64) @ rows[t], 2)
            y[t] += weight * (down[expert].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return y.reshape(x.shape)
