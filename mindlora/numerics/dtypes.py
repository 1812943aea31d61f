"""dtypes of stored tensors in NumPy, bfloat16 included: to float32 and back, rounded once."""

from typing import Tuple

import numpy as np

# NumPy has no bfloat16: its 16 bits, under a name of their own so that nothing takes them for a whole number.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])
# What rounding to nearest does to a number: at most this share of it, or, near zero, this much.
ROUNDING = {"float32": (2.0**-24, 2.0**-150), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


def to_float32(array: np.ndarray) -> np.ndarray:
    """Returns ``array`` as float32; exact for bfloat16 and float16."""
    if array.dtype == BFLOAT16:
        bits = array["bfloat16"].astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return array.astype(np.float32, copy=False)


def from_float32(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns float32 ``array`` rounded to ``dtype``: to the nearest, ties to even."""
    return rounded(array, dtype)[0]


def rounded(array: np.ndarray, dtype: np.dtype) -> Tuple[np.ndarray, np.ndarray]:
    """Returns float32 ``array`` rounded to ``dtype``, to the nearest, ties to even; and that as float32 again."""
    if dtype != BFLOAT16:
        stored = array.astype(dtype, copy=False)
        return stored, to_float32(stored)
    # Of one axis at least, so that a scalar is worked on in place too.
    whole = np.ascontiguousarray(array)
    bits = whole.view(np.uint32)
    upper = bits >> 16
    upper &= 1
    upper += 0x7FFF
    upper += bits
    upper &= 0xFFFF0000
    # Rounding would carry a NaN's bits over into another number.
    nan = np.isnan(whole)
    if nan.any():
        upper[nan] = 0x7FC00000
    return (
        (upper >> 16).astype(np.uint16).view(BFLOAT16).reshape(array.shape),
        upper.view(np.float32).reshape(array.shape),
    )


def dtype_name(dtype: np.dtype) -> str:
    """Returns float32, float16, bfloat16, ... for messages."""
    return "bfloat16" if dtype == BFLOAT16 else np.dtype(dtype).name


FLOATS = (np.dtype("<f8"), np.dtype("<f4"), np.dtype("<f2"), BFLOAT16)
