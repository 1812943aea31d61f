"""MindSpore's .ckpt files: the bytes that mindspore.save_checkpoint writes, and its files read back."""

import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.core.formats import ckpt_file, protobuf
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from tests.support.adapter_samples import record

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"]
DTYPES += ["uint64", "uint32", "uint16", "uint8", "bool"]
FUZZ = settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def values(dtype, shape=(3, 4), seed=0):
    array = (np.random.default_rng(seed).normal(size=shape) * 5).astype(np.float32)
    return from_float32(array, BFLOAT16) if dtype == "bfloat16" else array.astype(dtype)


def tensor(array):
    if array.dtype == BFLOAT16:
        bits = array["bfloat16"].astype(np.uint32) << 16
        return ms.Tensor(bits.view(np.float32), ms.bfloat16)
    return ms.Tensor(array)


def save(path, arrays, **options):
    """Writes a .ckpt as MindSpore does."""
    ms.save_checkpoint([{"name": name, "data": tensor(array)} for name, array in arrays.items()], str(path), **options)
    return path.read_bytes()


def read(path):
    return ckpt_file.read(str(path), lambda name: True)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 1, 3)])
def test_the_bytes_are_mindspores(tmp_path, dtype, shape):
    arrays = {"model.a": values(dtype, shape), "model.b": values(dtype, shape, seed=1)}
    expected = save(tmp_path / "theirs.ckpt", arrays)
    ckpt_file.write_arrays(str(tmp_path / "mine.ckpt"), arrays.items())
    assert (tmp_path / "mine.ckpt").read_bytes() == expected
    found, text = read(tmp_path / "theirs.ckpt")
    assert_same(found, arrays)
    assert text == ""


def test_a_scalar_is_read_in_each_form(tmp_path):
    scalar = np.array(2.5, np.float32)
    save(tmp_path / "theirs.ckpt", {"a": scalar})
    ckpt_file.write_arrays(str(tmp_path / "mine.ckpt"), [("a", scalar)])
    for name in ("theirs.ckpt", "mine.ckpt"):
        assert_same(read(tmp_path / name)[0], {"a": scalar})
        assert ms.load_checkpoint(str(tmp_path / name))["a"].asnumpy() == 2.5


def test_a_text_is_mindspores(tmp_path):
    arrays, text = {"model.a": values("float32")}, '{"alphas": "\u03b1"}'
    ckpt_file.write(str(tmp_path / "mine.ckpt"), arrays, text)
    extra = {"mindlora": text}
    begin = [{"name": "mindlora_begin", "data": ms.Tensor(1, ms.int32)}]
    ms.save_checkpoint(
        begin + [{"name": "model.a", "data": tensor(arrays["model.a"])}],
        str(tmp_path / "theirs.ckpt"),
        append_dict=extra,
    )
    assert (tmp_path / "mine.ckpt").read_bytes() == (tmp_path / "theirs.ckpt").read_bytes()
    found, found_text = read(tmp_path / "mine.ckpt")
    assert_same(found, arrays)
    assert found_text == text
    assert ms.load_checkpoint(str(tmp_path / "mine.ckpt"))["mindlora"] == text


def test_a_large_tensor_is_in_several_records(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt_file, "_PIECE_BYTES", 64)
    arrays = {"a": values("float32", (7, 5)), "b": values("bfloat16", (100,)), "c": values("int8", (2,))}
    ckpt_file.write_arrays(str(tmp_path / "a.ckpt"), arrays.items())
    content = memoryview((tmp_path / "a.ckpt").read_bytes())
    records = [next(iter(protobuf.fields(record.content))).content for record in protobuf.fields(content)]
    assert [bytes(name) for name in records] == [b"a"] * 3 + [b"b"] * 4 + [b"c"]
    assert_same(read(tmp_path / "a.ckpt")[0], arrays)
    theirs = ms.load_checkpoint(str(tmp_path / "a.ckpt"))
    np.testing.assert_array_equal(theirs["a"].asnumpy(), arrays["a"])
    assert theirs["b"].dtype == ms.bfloat16 and theirs["b"].shape == (100,)


def test_a_checksum_is_checked(tmp_path):
    arrays = {"a": values("float32")}
    content = save(tmp_path / "a.ckpt", arrays, crc_check=True)
    assert content[-17:-10] == b"crc_num"
    assert_same(read(tmp_path / "a.ckpt")[0], arrays)
    (tmp_path / "a.ckpt").write_bytes(content[:30] + bytes([content[30] ^ 1]) + content[31:])
    with pytest.raises(TruncatedAdapterError, match="its checksum does not match its content"):
        read(tmp_path / "a.ckpt")


def test_only_wanted_tensors_are_returned(tmp_path):
    arrays = {"model.a": values("float32"), "epoch_num": np.array(3, np.int32)}
    save(tmp_path / "a.ckpt", arrays)
    found, _ = ckpt_file.read(str(tmp_path / "a.ckpt"), lambda name: "." in name)
    assert_same(found, {"model.a": arrays["model.a"]})


@pytest.mark.parametrize(
    "records, error, message",
    [
        ([("a", "Float8", (1,), b"1")], AdapterFormatError, "a is stored as Float8, which is not supported"),
        (
            [("a", "Int8", (1,), b"1"), ("b", "Int8", (1,), b"1"), ("a", "Int8", (1,), b"1")],
            AdapterFormatError,
            "has a twice",
        ),
        ([("a", "Int8", (2,), b"1")], TruncatedAdapterError, r"a is Int8 \[2\] in 1 bytes"),
        ([("a", "Int8", (-1,), b"1")], TruncatedAdapterError, r"a is Int8 \[-1\] in 1 bytes"),
        ([("a", "Int8", (1,) * 33, b"1")], TruncatedAdapterError, "a is Int8 .* in 1 bytes"),
        ([("mindlora_begin", "Int32", (), b"1234")], TruncatedAdapterError, "its last record is missing"),
        ([("mindlora", "str", (0,), b"1234")], TruncatedAdapterError, "its last record is not text"),
    ],
)
def test_damaged_records(tmp_path, records, error, message):
    (tmp_path / "a.ckpt").write_bytes(record(*records))
    with pytest.raises(error, match=message):
        read(tmp_path / "a.ckpt")


def test_an_empty_file_and_a_record_without_content(tmp_path):
    for content, message in ((b"", "it is empty"), (protobuf.content(1, b""), "a record lacks its name")):
        (tmp_path / "a.ckpt").write_bytes(content)
        with pytest.raises(TruncatedAdapterError, match=message):
            read(tmp_path / "a.ckpt")


@FUZZ
@given(st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=3), st.integers(0, 4)), min_size=1, max_size=3))
def test_damaged_bytes_end_in_an_error_of_ours(tmp_path, damages):
    path = tmp_path / "a.ckpt"
    ckpt_file.write(str(path), {"a": values("float32", (2, 3)), "b": values("int8", (4,))}, "text")
    content = path.read_bytes()
    for share, new, removed in damages:
        at = int(share * len(content))
        content = content[:at] + new + content[at + removed :]
    path.write_bytes(content)
    try:
        found, _ = read(path)
    except (AdapterFormatError, TruncatedAdapterError) as error:
        assert str(error).startswith(str(path))
        return
    assert all(array.size for array in found.values())


@pytest.mark.parametrize("options", [{}, {"crc_check": True}])
def test_shapes_are_read_without_the_tensors(tmp_path, options):
    arrays = {"a.weight": values("float32", (3, 4)), "b": values("bfloat16", (5,)), "scalar": values("int32", ())}
    save(tmp_path / "a.ckpt", arrays, **options)
    found = {name: shape for name, shape in ckpt_file.shapes(str(tmp_path / "a.ckpt")).items() if name in arrays}
    assert found == {
        name: array.shape for name, array in ckpt_file.read(str(tmp_path / "a.ckpt"), lambda _: True)[0].items()
    }
    for content in (b"", (tmp_path / "a.ckpt").read_bytes()[:40]):
        (tmp_path / "cut.ckpt").write_bytes(content)
        with pytest.raises(TruncatedAdapterError, match="truncated or not a MindSpore checkpoint"):
            ckpt_file.shapes(str(tmp_path / "cut.ckpt"))
