"""Codes of a few bits that are packed one after the other, the first in the lowest bits, and what they decode to."""

from typing import Optional

import numpy as np


def _bytes_apart(bits: int) -> np.ndarray:
    """Returns uint8 [256, 8 / bits]: the codes in each byte."""
    return (np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1).astype(np.uint8)


# Bits that divide 8 -> the codes in each byte.
_CODES_OF_BYTE = {bits: _bytes_apart(bits) for bits in (1, 2, 4)}


def words_for(count: int, bits: int) -> int:
    """Returns how many words of 32 bits hold ``count`` codes."""
    return -(-count * bits // 32)


def unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the first ``count`` codes of each row.

    Args:
        words (ndarray): int32 [rows, words]; where ``bits`` does not divide 32, codes go on in the next word.
        bits (int): Of a code, 1 to 8.
        count (int): Codes of a row.

    Returns:
        ndarray, uint8 [rows, count].
    """
    in_bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return in_bytes[:, :count]
    if bits in _CODES_OF_BYTE:
        return _CODES_OF_BYTE[bits][in_bytes].reshape(len(words), -1)[:, :count]
    # As many bytes as a code has bits hold eight codes.
    in_bytes = np.pad(in_bytes, [(0, 0), (0, -in_bytes.shape[1] % bits)])
    eight = np.zeros((len(words), in_bytes.shape[1] // bits), np.uint64)
    for index in range(bits):
        eight |= in_bytes[:, index::bits].astype(np.uint64) << np.uint64(8 * index)
    codes = eight[:, :, None] >> (np.arange(8, dtype=np.uint64) * np.uint64(bits)) & np.uint64((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]


def from_groups(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: Optional[np.ndarray] = None
) -> np.ndarray:
    """W = (codes - zeros) * scales, of the group of each column.

    Args:
        codes (ndarray): Integers [rows, columns].
        zeros (ndarray): float32 [rows, groups], or [1, 1] for one.
        scales (ndarray): float32 [rows, groups].
        group_of (ndarray): Integers [columns], the group of each column. Default: None, groups of equal size in turn.

    Returns:
        ndarray, float32 [rows, columns].
    """
    decoded = codes.astype(np.float32)
    if group_of is not None:
        decoded -= zeros[:, group_of] if zeros.shape[1] > 1 else zeros
        decoded *= scales[:, group_of]
        return decoded
    in_groups = decoded.reshape(len(codes), scales.shape[1], -1)
    in_groups -= zeros[:, :, None]
    in_groups *= scales[:, :, None]
    return decoded
