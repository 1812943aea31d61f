"""nf4_dequantize in NumPy: what the kernel must compute, to the last bit of float32."""

import numpy as np

# fmt: off
TABLE = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)
# fmt: on


def nf4_dequantize(
    codes: np.ndarray, absmax: np.ndarray, scales: np.ndarray, offsets: np.ndarray, columns: int
) -> np.ndarray:
    """W[n, 64 b + i] = (offsets[g] + scales[g] * absmax[n, b]) * TABLE[code], g = (n * blocks + b) // 256, in float32.

    For i < 32, code is the low half of byte codes[n, 32 b + i]; for i >= 32, the high half of codes[n, 32 b + i - 32].
    Each of the three operations is rounded to float32. A narrower W is this one, rounded to nearest even.

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
    weight = np.empty((rows, blocks * 64), np.float32)
    for n in range(rows):
        for b in range(blocks):
            group = (n * blocks + b) // 256
            largest = offsets[group] + scales[group] * np.float32(absmax[n, b])
            of_block = codes[n, 32 * b : 32 * b + 32]
            weight[n, 64 * b : 64 * b + 32] = largest * TABLE[of_block & 15]
            weight[n, 64 * b + 32 : 64 * b + 64] = largest * TABLE[of_block >> 4]
    return weight[:, :columns]
