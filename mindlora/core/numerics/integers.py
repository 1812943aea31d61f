"""Weights in integers of 4 or 8 bits, as quantized bases are published. ops/integer_linear/README.md has the bytes.

W = (code - zero) * scale, with the zero and scale of each column's group. NumPy alone.
"""

import dataclasses
from typing import Dict, NamedTuple, Tuple

import numpy as np

from mindlora.core.numerics.dtypes import to_float32

# The numbers in a block of 4-bit codes, and in half a block; a group is a multiple of the half.
BLOCK, HALF = 64, 32
BITS = (4, 8)
# Field of IntegerArray -> name of its tensor in a network, after the path of its cell.
TENSOR_NAMES = {"codes": "weight", "zeros": "weight_zeros", "scales": "weight_scales"}


class IntegerForm(NamedTuple):
    """How the integers of a weight are held.

    Attributes:
        bits (int): Bits of a code, 4 or 8.
        groups (int): Groups of columns, each with its own scale and zero.
        dtype (dtype): The dtype of the scales.
    """

    bits: int
    groups: int
    dtype: np.dtype

    def layout(self, rows: int, columns: int) -> Dict[str, Tuple[Tuple[int, int], np.dtype]]:
        """Returns field of IntegerArray -> (shape, dtype) for a weight [rows, columns]."""
        return {
            "codes": ((rows, columns * self.bits // 8), np.dtype(np.uint8)),
            "zeros": ((rows, self.groups), np.dtype(np.uint8)),
            "scales": ((rows, self.groups), self.dtype),
        }


@dataclasses.dataclass(frozen=True)
class IntegerArray:
    """Rows of a weight in integers.

    Attributes:
        codes (ndarray): uint8 [N, K * bits / 8]. With 4 bits, byte i of a block's 32 holds the code of its number i in
            the low half and of number 32 + i in the high one. With 8 bits, they are the bits of int8.
        zeros (ndarray): uint8 [N, groups]; with 8 bits, the bits of int8.
        scales (ndarray): [N, groups], float32, float16 or bfloat16.
        bits (int): 4 or 8.
    """

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    bits: int


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns codes [N, K] as bytes, uint8 [N, K * bits / 8]; the codes are uint8 for 4 bits and int8 for 8."""
    if bits == 8:
        return codes.view(np.uint8)
    halves = codes.reshape(len(codes), -1, 2, HALF)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(codes), -1)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns the codes that ``pack`` packed."""
    if bits == 8:
        return packed.view(np.int8)
    blocks = packed.reshape(len(packed), -1, HALF)
    return np.stack([blocks & 15, blocks >> 4], axis=2).reshape(len(packed), -1)


def dequantize(array: IntegerArray) -> np.ndarray:
    """W = (code - zero) * scale, float32 [N, K]."""
    codes = unpack(array.codes, array.bits).astype(np.float32)
    zeros = array.zeros.view(np.int8) if array.bits == 8 else array.zeros
    grouped = codes.reshape(len(codes), zeros.shape[1], -1)
    grouped -= zeros[:, :, None].astype(np.float32)
    grouped *= to_float32(array.scales)[:, :, None]
    return codes


def tensor_name(weight: str, field: str) -> str:
    """Returns the tensor name of a field of IntegerArray; the codes are stored under the weight's own name."""
    return weight + TENSOR_NAMES[field][len(TENSOR_NAMES["codes"]) :]
