"""Conversion of stored dtypes to float32 and back; bfloat16 against exact arithmetic."""

import numpy as np
import pytest

from mindlora.core.numerics.dtypes import BFLOAT16, dtype_name, from_float32, to_float32


def nearest_bfloat16(bits):
    """Returns the bfloat16 number nearest to a float32, by distance in float64; of two equally near, the even one.

    Infinity counts as 2 ** 128, the number after the largest.
    """
    below = (bits & 0x7FFF0000).astype(np.uint64)

    def magnitude(pattern):
        exponent, fraction = (pattern >> 23).astype(np.int64), (pattern & 0x7FFFFF).astype(np.float64)
        normal = np.ldexp(1 + fraction / 2**23, exponent - 127)
        return np.where(exponent == 0, np.ldexp(fraction, -149), normal)

    x, low, high = (magnitude(pattern) for pattern in ((bits & 0x7FFFFFFF).astype(np.uint64), below, below + 0x10000))
    odd = (below >> 16) & 1
    up = (high - x < x - low) | ((high - x == x - low) & (odd == 1))
    return (((bits & 0x80000000).astype(np.uint64) + below + np.where(up, 0x10000, 0).astype(np.uint64)) >> 16).astype(
        np.uint16
    )


def test_rounding_to_bfloat16_at_each_bfloat16_number_and_around_each_tie():
    lower = np.array([0, 1, 2, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF], np.uint32)
    bits = ((np.arange(2**16, dtype=np.uint32) << 16)[:, None] | lower).reshape(-1)
    numbers = bits.view(np.float32)
    rounded = from_float32(numbers, BFLOAT16)["bfloat16"]
    finite = ~np.isnan(numbers)
    assert finite.sum() > 650_000
    np.testing.assert_array_equal(rounded[finite], nearest_bfloat16(bits[finite]))
    # NaN stays NaN, whatever its bits.
    assert np.isnan(to_float32(rounded[~finite].view(BFLOAT16))).all()


@pytest.mark.parametrize(
    "number, expected",
    [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0, 0x3F80),
        (1 + 2**-8, 0x3F80),
        (1 + 3 * 2**-8, 0x3F82),
        (np.float32(3.4028235e38), 0x7F80),
        (-np.float32(3.4028235e38), 0xFF80),
        (3.3895314e38, 0x7F7F),
        (np.inf, 0x7F80),
        (-np.inf, 0xFF80),
        (1e-45, 0x0000),
        (9.2e-41, 0x0001),
    ],
)
def test_known_roundings_to_bfloat16(number, expected):
    rounded = from_float32(np.array(number, np.float32), BFLOAT16)
    assert rounded.shape == () and rounded["bfloat16"] == expected


def test_bfloat16_to_float32_is_exact():
    patterns = np.arange(2**16, dtype=np.uint16)
    wide = to_float32(patterns.view(BFLOAT16))
    np.testing.assert_array_equal(wide.view(np.uint32), patterns.astype(np.uint32) << 16)
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(from_float32(wide, BFLOAT16)["bfloat16"][numbers], patterns[numbers])


def test_other_dtypes_are_cast_as_numpy_does():
    wide = np.array([[1.5, -2.25], [65504, 1e-7]], np.float32)
    for dtype in ("<f2", "<f4", "<f8"):
        narrow = from_float32(wide, np.dtype(dtype))
        np.testing.assert_array_equal(narrow, wide.astype(dtype))
        np.testing.assert_array_equal(to_float32(narrow), narrow.astype(np.float32))
    transposed = from_float32(wide.T, BFLOAT16)
    np.testing.assert_array_equal(to_float32(transposed)[0], [1.5, 65536])


def test_dtypes_have_the_names_that_messages_use():
    assert [dtype_name(np.dtype(dtype)) for dtype in ("<f8", "<f2", BFLOAT16, "<i8", "u1", "?")] == [
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "uint8",
        "bool",
    ]
