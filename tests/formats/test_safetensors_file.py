"""TensorFile and write_arrays against safetensors' own reader and writer, and bfloat16 against exact arithmetic."""

import json

import numpy as np
import pytest
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file, save_file

from mindlora.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.formats.safetensors_file import TensorFile, layout, write, write_arrays
from mindlora.numerics.dtypes import BFLOAT16, dtype_name, from_float32, to_float32

# (safetensors' name in a file, its name for the library's writer, NumPy's dtype).
DTYPES = [
    ("F64", "float64", "<f8"),
    ("F32", "float32", "<f4"),
    ("F16", "float16", "<f2"),
    ("BF16", "bfloat16", BFLOAT16),
    ("I64", "int64", "<i8"),
    ("I32", "int32", "<i4"),
    ("I16", "int16", "<i2"),
    ("I8", "int8", "i1"),
    ("U64", "uint64", "<u8"),
    ("U32", "uint32", "<u4"),
    ("U16", "uint16", "<u2"),
    ("U8", "uint8", "u1"),
    ("BOOL", "bool", "?"),
]
SHAPES = [(), (1,), (3,), (2, 3), (5, 1, 4), (0,), (3, 0), (0, 4)]


def sample(dtype, shape, seed=0):
    """Returns an array of random bits, whatever they mean; 0 and 1 for bool."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 256, size, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def test_every_dtype_and_shape_that_the_library_writes_is_read(tmp_path):
    # The library writes bfloat16 for PyTorch alone: tests/peers has that.
    arrays = {
        f"{file}{list(shape)}": sample(dtype, shape, i)
        for i, (file, _, dtype) in enumerate(DTYPES)
        for shape in SHAPES
        if file != "BF16"
    }
    save_file(arrays, tmp_path / "a.safetensors", {"format": "pt", "é": "日本"})
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert file.tensors.keys() == arrays.keys() and file.metadata == {"format": "pt", "é": "日本"}
        for key, array in arrays.items():
            found = file.read(key)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
            assert file.tensors[key][:2] == (array.dtype, array.shape) and file.tensors[key].size == array.nbytes


def test_every_dtype_and_shape_that_is_written_the_library_reads(tmp_path):
    arrays = {
        f"{file}{list(shape)}": sample(dtype, shape, i) for i, (file, _, dtype) in enumerate(DTYPES) for shape in SHAPES
    }
    write_arrays(tmp_path / "a.safetensors", arrays, {"who": "mindlora"})
    raw = (tmp_path / "a.safetensors").read_bytes()
    found = dict(deserialize(raw))
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        assert found[key]["dtype"] == key.split("[")[0] and tuple(found[key]["shape"]) == array.shape
        assert bytes(found[key]["data"]) == array.tobytes()
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"who": "mindlora"}
    assert int.from_bytes(raw[:8], "little") % 8 == 0  # The format asks for tensors on 8 bytes' boundaries.


def test_arrays_in_any_order_of_memory_are_written_by_their_values(tmp_path):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {"t": whole.T, "step": whole[::2, ::3], "back": whole[::-1], "fortran": np.asfortranarray(whole)}
    write_arrays(str(tmp_path / "a.safetensors"), arrays)
    found = load_file(tmp_path / "a.safetensors")
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)


def test_a_tensor_may_come_in_pieces(tmp_path):
    array = np.arange(12, dtype=np.float16).reshape(6, 2)
    entries = [("b", array.dtype, array.shape), ("a", np.dtype("<i4"), (2,))]
    write(str(tmp_path / "a.safetensors"), entries, [array[:1], array[1:4], array[4:], np.array([7, 8], np.int32)])
    found = load_file(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(found["b"], array)
    np.testing.assert_array_equal(found["a"], [7, 8])
    for contents in ([array], [array, np.zeros(3, np.int32)]):
        with pytest.raises(AssertionError, match="bytes were written, and the header declares"):
            write(str(tmp_path / "b.safetensors"), entries, contents)


def test_layout_says_where_each_tensor_begins(tmp_path):
    arrays = {"x": sample("<f4", (3, 2)), "y": sample(BFLOAT16, (5,)), "z": sample("<f8", ())}
    text, begins, end = layout([(key, array.dtype, array.shape) for key, array in arrays.items()], {"m": "1"})
    write(
        str(tmp_path / "a.safetensors"),
        [(key, array.dtype, array.shape) for key, array in arrays.items()],
        arrays.values(),
        {"m": "1"},
    )
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert raw.startswith(text) and len(raw) == end
    for begin, array in zip(begins, arrays.values()):
        assert raw[begin : begin + array.nbytes] == array.tobytes()
    assert layout([])[0] == (8).to_bytes(8, "little") + b"{}      " and layout([])[2] == 16


@pytest.mark.parametrize("dtype", ["<f4", "<f2", BFLOAT16, "<i8", "?"])
def test_rows_are_those_of_the_whole(tmp_path, dtype):
    arrays = {
        "x": sample(dtype, (7, 3, 2)),
        "flat": sample(dtype, (5,), 1),
        "one": sample(dtype, (), 2),
        "none": sample(dtype, (4, 0)),
    }
    write_arrays(str(tmp_path / "a.safetensors"), arrays)
    with TensorFile(tmp_path / "a.safetensors") as file:
        for begin in range(8):
            for end in range(begin, 8):
                rows = file.read_rows("x", begin, end)
                assert (rows.shape, rows.dtype, rows.tobytes()) == (
                    (end - begin, 3, 2),
                    arrays["x"].dtype,
                    arrays["x"][begin:end].tobytes(),
                )
        assert file.read_rows("flat", 1, 4).tobytes() == arrays["flat"][1:4].tobytes()
        assert file.read_rows("one", 0, 1).tobytes() == arrays["one"].tobytes()
        assert file.read_rows("none", 1, 3).shape == (2, 0)


# bfloat16 -------------------------------------------------------------------------------------------------------


def nearest_bfloat16(bits):
    """The oracle: of the two bfloat16 numbers around a float32, by exact distance in float64; of two as near, the even.

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


def test_rounding_to_bfloat16_at_every_number_of_its_own_and_around_every_tie():
    lower = np.array([0, 1, 2, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF], np.uint32)
    bits = ((np.arange(2**16, dtype=np.uint32) << 16)[:, None] | lower).reshape(-1)
    numbers = bits.view(np.float32)
    rounded = from_float32(numbers, BFLOAT16)["bfloat16"]
    finite = ~np.isnan(numbers)
    assert finite.sum() > 650_000
    np.testing.assert_array_equal(rounded[finite], nearest_bfloat16(bits[finite]))
    # Every NaN stays one, whatever its bits.
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


def test_bfloat16_to_float32_is_exact_for_each_of_its_numbers():
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
    assert [dtype_name(np.dtype(dtype)) for _, _, dtype in DTYPES] == [library for _, library, _ in DTYPES]


# Refusals -------------------------------------------------------------------------------------------------------


def raw_file(path, header, content=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header, content, error, message",
    [
        ({"a": entry(shape=[2**40], offsets=[0, 2**42])}, b"", TruncatedAdapterError, "is truncated or damaged: its"),
        ({"a": entry()}, b"12345", TruncatedAdapterError, "is truncated or damaged: its"),
        ({"a": entry("F8_E4M3", offsets=[0, 1])}, b"1", AdapterFormatError, ": a is stored as F8_E4M3, which is not"),
        (
            {"a": entry(shape=[0, 2**62], offsets=[0, 0])},
            b"",
            AdapterFormatError,
            ": a is [0, 4611686018427387904], a shape that no array can have.",
        ),
        ({"a": entry(shape=[1] * 40)}, b"1234", AdapterFormatError, "a shape that no array can have."),
        ({"a": ["F32", [1], [0, 4]]}, b"1234", AdapterFormatError, "the entry of a in its header is not an object."),
        (
            b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2),
            b"1234",
            AdapterFormatError,
            "has a twice, so it is unclear which one counts. Remove one.",
        ),
        (b'{"__metadata__":{"x":"1","x":"2"}}', b"", AdapterFormatError, "has x twice"),
        ([1], b"", AdapterFormatError, "is not a safetensors file: "),
    ],
)
def test_what_is_no_sound_file_is_refused(tmp_path, header, content, error, message):
    path = raw_file(tmp_path / "a.safetensors", header, content)
    with pytest.raises(error) as caught:
        TensorFile(path)
    assert type(caught.value) is error and str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_a_file_that_becomes_shorter_while_it_is_open(tmp_path):
    path = tmp_path / "a.safetensors"
    write_arrays(str(path), {"x": np.zeros(1000, np.float32)})
    with TensorFile(path) as file:
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(TruncatedAdapterError) as error:
            file.read("x")
    assert str(error.value) == f"{path} became shorter while it was read."
