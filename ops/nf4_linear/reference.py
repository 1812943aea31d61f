"""nf4_linear in NumPy: what every path must compute, and how the bytes of a weight are read."""

from typing import Optional, Tuple

import numpy as np

# fmt: off
TABLE = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)
# fmt: on


def dequantize(
    codes: np.ndarray, absmax: np.ndarray, scales: np.ndarray, offsets: np.ndarray, columns: int
) -> np.ndarray:
    """W[n, 64 b + i] = (offsets[g] + scales[g] * absmax[n, b]) * TABLE[code], g = (n * blocks + b) // 256, in float64.

    For i < 32, code is the low half of byte codes[n, 32 b + i]; for i >= 32, the high half of codes[n, 32 b + i - 32].

    Args:
        codes: uint8 [N, blocks * 32].
        absmax: uint8 [N, blocks].
        scales: float32 [groups].
        offsets: float32 [groups].
        columns: K, where blocks = ceil(K / 64).

    Returns:
        W, [N, K].
    """
    rows, blocks = absmax.shape
    weight = np.empty((rows, blocks * 64))
    for n in range(rows):
        for b in range(blocks):
            group = (n * blocks + b) // 256
            largest = float(offsets[group]) + float(scales[group]) * int(absmax[n, b])
            of_block = codes[n, 32 * b : 32 * b + 32]
            weight[n, 64 * b : 64 * b + 32] = largest * TABLE[of_block & 15]
            weight[n, 64 * b + 32 : 64 * b + 64] = largest * TABLE[of_block >> 4]
    return weight[:, :columns]


def nf4_linear(
    x: np.ndarray,
    codes: np.ndarray,
    absmax: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray,
    bias: Optional[np.ndarray] = None,
) -> np.ndarray:
    """y = x W^T (+ bias), in float64.

    Args:
        x: [tokens, K].
        codes, absmax, scales, offsets: As in dequantize.
        bias: [N].

    Returns:
        y, [tokens, N].
    """
    x = np.asarray(x, np.float64)
    y = x @ dequantize(codes, absmax, scales, offsets, x.shape[1]).T
    return y if bias is None else y + np.asarray(bias, np.float64)


def nf4_linear_grad(
    dy: np.ndarray, codes: np.ndarray, absmax: np.ndarray, scales: np.ndarray, offsets: np.ndarray, columns: int
) -> Tuple[np.ndarray, np.ndarray]:
    """The gradients of sum(dy * nf4_linear(x, ...)) with respect to x and bias, in float64. W is frozen and has none.

    Args:
        dy: [tokens, N].
        codes, absmax, scales, offsets, columns: As in dequantize.

    Returns:
        (dx, dbias), of shapes [tokens, K] and [N].
    """
    dy = np.asarray(dy, np.float64)
    return dy @ dequantize(codes, absmax, scales, offsets, columns), dy.sum(axis=0)


def squared_norms(codes: np.ndarray, absmax: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """||W||^2 of each row, [N], in float64; the arguments are dequantize's. What fills up a block is zero."""
    return (dequantize(codes, absmax, scales, offsets, 64 * absmax.shape[1]) ** 2).sum(axis=1)
