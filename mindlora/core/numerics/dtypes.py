"""The dtypes of stored tensors in NumPy, bfloat16 and float8 included; to float32 and back with one rounding."""

from typing import Tuple

import numpy as np

# NumPy has no bfloat16. This dtype holds the 16 bits in a named field, so that no code takes them for an integer.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])
# The 8 bits of float8_e4m3fn, which only weights in FP8 have (mindlora.files.base.quantized).
FLOAT8_E4M3 = np.dtype([("float8_e4m3", "u1")])
# Largest error of rounding to nearest: relative, and absolute near zero.
ROUNDING = {"float32": (2.0**-24, 2.0**-150), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


def to_float32(array: np.ndarray) -> np.ndarray:
    """Returns ``array`` as float32; exact for bfloat16 and float16."""
    if array.dtype == BFLOAT16:
        widened = np.empty(array.shape, np.float32)
        np.left_shift(array["bfloat16"], 16, out=widened.view(np.uint32), dtype=np.uint32)
        return widened
    return array.astype(np.float32, copy=False)


def from_float32(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns float32 ``array`` rounded to ``dtype``: to the nearest, ties to even."""
    return rounded(array, dtype)[0] if dtype == BFLOAT16 else array.astype(dtype, copy=False)


def scaled(array: np.ndarray, factor: float) -> np.ndarray:
    """Returns ``array`` times a factor, rounded once to its dtype; the same array if the factor is 1."""
    return array if factor == 1 else from_float32(to_float32(array) * np.float32(factor), array.dtype)


def rounded(array: np.ndarray, dtype: np.dtype) -> Tuple[np.ndarray, np.ndarray]:
    """Returns a float32 array rounded to ``dtype``, to nearest, ties to even, and the rounded values as float32."""
    if dtype != BFLOAT16:
        stored = array.astype(dtype, copy=False)
        return stored, to_float32(stored)
    # With at least one axis, so that a scalar is changed in place too.
    whole = np.ascontiguousarray(array)
    bits = whole.view(np.uint32)
    upper = bits >> 16
    upper &= 1
    upper += 0x7FFF
    upper += bits
    upper &= 0xFFFF0000
    # Rounding could turn the bits of a NaN into those of another number.
    nan = np.isnan(whole)
    if nan.any():
        upper[nan] = 0x7FC00000
    return (
        (upper >> 16).astype(np.uint16).view(BFLOAT16).reshape(array.shape),
        upper.view(np.float32).reshape(array.shape),
    )


def dtype_name(dtype: np.dtype) -> str:
    """Returns float32, float16, bfloat16, ... for a dtype."""
    return dtype.names[0] if dtype.names else np.dtype(dtype).name


def named_dtype(name: str) -> np.dtype:
    """Returns the dtype with this name: the inverse of dtype_name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


FLOATS = (np.dtype("<f8"), np.dtype("<f4"), np.dtype("<f2"), BFLOAT16)
