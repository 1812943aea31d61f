"""integer_linear in NumPy: what every path must compute, and how the bytes of a weight are read."""

import numpy as np


def dequantize(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """W[n, k] = (code[n, k] - zeros[n, g]) * scales[n, g], g = k // (K / groups), in float64.

    With 4 bits, for i < 32 code[n, 64 b + i] is the low half of byte codes[n, 32 b + i]; for i >= 32, the high half of
    codes[n, 32 b + i - 32]. With 8 bits, codes[n, k] and zeros are signed numbers in the bits of uint8.

    Args:
        codes: uint8 [N, K * bits / 8].
        zeros: uint8 [N, groups].
        scales: [N, groups].
        bits: 4 or 8.

    Returns:
        W, [N, K].
    """
    rows = len(codes)
    if bits == 8:
        numbers, zeros = codes.view(np.int8), zeros.view(np.int8)
    else:
        numbers = np.empty((rows, 2 * codes.shape[1]), np.int64)
        for block in range(codes.shape[1] // 32):
            packed = codes[:, 32 * block : 32 * block + 32]
            numbers[:, 64 * block : 64 * block + 32] = packed & 15
            numbers[:, 64 * block + 32 : 64 * block + 64] = packed >> 4
    group = np.arange(numbers.shape[1]) // (numbers.shape[1] // zeros.shape[1])
    return (numbers.astype(np.float64) - zeros[:, group]) * np.asarray(scales, np.float64)[:, group]


def integer_linear(x: np.ndarray, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """y = x W^T, in float64.

    Args:
        x: [tokens, K].
        codes, zeros, scales, bits: As in dequantize.

    Returns:
        y, [tokens, N].
    """
    return np.asarray(x, np.float64) @ dequantize(codes, zeros, scales, bits).T


def integer_linear_grad(
    dy: np.ndarray, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int
) -> np.ndarray:
    """The gradient of sum(dy * integer_linear(x, ...)) with respect to x, in float64. W is frozen and has none.

    Args:
        dy: [tokens, N].
        codes, zeros, scales, bits: As in dequantize.

    Returns:
        dx, [tokens, K].
    """
    return np.asarray(dy, np.float64) @ dequantize(codes, zeros, scales, bits)


def squared_norms(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """||W||^2 of each row, [N], in float64; the arguments are dequantize's."""
    return (dequantize(codes, zeros, scales, bits) ** 2).sum(axis=1)
