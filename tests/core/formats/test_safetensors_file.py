"""TensorFile and write_arrays against safetensors' own reader and writer."""

import json

import numpy as np
import pytest
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file, save_file

from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.core.formats.safetensors_file import TensorFile, layout, write, write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, dtype_name

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
    """Returns an array of random bits; 0 and 1 for bool."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 256, size, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def test_every_dtype_and_shape_that_the_library_writes_is_read(tmp_path):
    # The library writes bfloat16 only for PyTorch; tests/peers covers that.
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
    assert int.from_bytes(raw[:8], "little") % 8 == 0  # The format asks for tensors on 8-byte boundaries.


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
        with pytest.raises(AssertionError, match="bytes were written, but the header declares"):
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
def test_rows_are_those_of_the_tensor(tmp_path, dtype):
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


@pytest.mark.parametrize("dtype", ["<f4", "<f2", BFLOAT16, "u1"])
def test_what_is_mapped_is_the_file_s_and_a_change_of_it_is_the_process_s(tmp_path, dtype):
    path = str(tmp_path / "a.safetensors")
    write_arrays(path, {"one": sample(dtype, (5, 3)), "scalar": sample(dtype, ()), "void": sample(dtype, (0, 4))})
    with TensorFile(path, mapped=True) as file:
        arrays = {key: file.read(key) for key in file.tensors}
        rows = file.read_rows("one", 1, 4)
    with TensorFile(path) as file:
        for key, array in arrays.items():
            assert array.tobytes() == file.read(key).tobytes() and array.shape == file.tensors[key].shape
        assert rows.tobytes() == arrays["one"][1:4].tobytes() and np.shares_memory(rows, arrays["one"])
        rows.view(np.uint8)[:] = 7
        assert arrays["one"][1:4].tobytes() == rows.tobytes() != file.read_rows("one", 1, 4).tobytes()


def test_each_dtype_has_the_librarys_name():
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
            ": a is [0, 4611686018427387904], which is not a valid array shape.",
        ),
        ({"a": entry(shape=[1] * 40)}, b"1234", AdapterFormatError, "which is not a valid array shape."),
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
def test_damaged_files_are_refused(tmp_path, header, content, error, message):
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
    assert str(error.value) == (
        f"{path} became shorter while it was read. Try again when nothing writes to it any more."
    )
