"""PyTorch's .bin: what torch.save writes is read, and nothing else that a pickle can ask for is done."""

import os
import pickle
import time
import zipfile

import numpy as np
import pytest

from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.core.formats import torch_pickle
from mindlora.core.numerics.dtypes import BFLOAT16
from tests.support import torch_zip as tz

# data.pkl of torch.save({"x": a, "t": a.t(), "s": a[1:]}) with a = torch.arange(6.).reshape(2, 3), as PyTorch 2.13
# wrote it: the three share one storage, and repeated objects come from the memo.
MEMOIZED = (
    b"\x80\x02}q\x00(X\x01\x00\x00\x00xq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storage"
    b"q\x03ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x06tq\x07QK\x00K\x02"
    b"K\x03\x86q\x08K\x03K\x01\x86q\t\x89ccollections\nOrderedDict\nq\n)Rq\x0btq\x0cRq\rX\x01\x00\x00\x00tq"
    b"\x0eh\x02((h\x03h\x04h\x05h\x06K\x06tq\x0fQK\x00K\x03K\x02\x86q\x10K\x01K\x03\x86q\x11\x89h\n)Rq\x12tq"
    b"\x13Rq\x14X\x01\x00\x00\x00sq\x15h\x02((h\x03h\x04h\x05h\x06K\x06tq\x16QK\x03K\x01K\x03\x86q\x17K\x03K"
    b"\x01\x86q\x18\x89h\n)Rq\x19tq\x1aRq\x1bu."
)


def refused(path, message, error=AdapterFormatError):
    with pytest.raises(error) as caught:
        torch_pickle.read(str(path))
    assert type(caught.value) is error and str(caught.value).startswith(str(path)), caught.value
    assert message in str(caught.value)


def read_program(tmp_path, value, storages=()):
    tz.write(tmp_path / "a.bin", value, storages)
    return torch_pickle.read(str(tmp_path / "a.bin"))


FLOATS = np.arange(6, dtype=np.float32)


def test_what_torch_itself_wrote(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        archive.writestr("m/data.pkl", MEMOIZED)
        archive.writestr("m/data/0", FLOATS.tobytes())
    found = torch_pickle.read(str(tmp_path / "a.bin"))
    a = FLOATS.reshape(2, 3)
    assert list(found) == ["x", "t", "s"]
    for key, expected in {"x": a, "t": a.T, "s": a[1:]}.items():
        np.testing.assert_array_equal(found[key], expected)
        assert found[key].dtype == np.float32 and found[key].flags.c_contiguous


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", "<i8", "<i4", BFLOAT16])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (3, 0), (2, 1, 4)])
def test_dtypes_and_shapes(tmp_path, dtype, shape):
    dtype = np.dtype(dtype)
    bits = np.random.default_rng(0).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    array = bits.view(dtype).reshape(shape)
    tz.save(tmp_path / "a.bin", {"x": array})
    found = torch_pickle.read(str(tmp_path / "a.bin"))["x"]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    "shape, strides, offset",
    [
        ((2, 2), (3, 1), 1),
        ((3, 2), (1, 3), 0),
        ((2,), (0,), 5),
        ((2, 2), (2, 2), 1),
        ((1, 6), (99, 1), 0),
        ((), (), 5),
        ((0, 4), (4, 1), 3),
    ],
)
def test_views_are_made_contiguous(tmp_path, shape, strides, offset):
    stored = tz.storage("FloatStorage", "0", 6)
    found = read_program(
        tmp_path, tz.items([("x", tz.rebuilt(stored, shape, strides, offset))]), {"0": FLOATS.tobytes()}
    )["x"]
    expected = np.empty(shape, np.float32)
    for index in np.ndindex(*shape):
        expected[index] = FLOATS[offset + sum(i * stride for i, stride in zip(index, strides))]
    np.testing.assert_array_equal(found, expected)
    assert found.flags.c_contiguous


def test_a_parameter_and_an_ordered_dict_with_a_state(tmp_path):
    ordered = tz.named("collections", "OrderedDict") + b")R"
    parameter = tz.call(tz.named("torch._utils", "_rebuild_parameter"), tz.tensor(FLOATS, "0"), b"\x88", ordered)
    state = tz.items([("_metadata", tz.items([("", tz.items([("version", tz.number(1))]))]))])
    found = read_program(tmp_path, ordered + tz.text("x") + parameter + b"s" + state + b"b", {"0": FLOATS.tobytes()})
    assert list(found) == ["x"]
    np.testing.assert_array_equal(found["x"], FLOATS)


def test_a_later_protocol(tmp_path):
    def short(value):
        return b"\x8c" + bytes([len(value)]) + value.encode()

    stored = (
        b"("
        + short("storage")
        + b"\x94"
        + short("torch")
        + short("FloatStorage")
        + b"\x93"
        + short("0")
        + short("cpu")
        + tz.number(6)
        + b"tQ"
    )
    rebuilt = (
        short("torch._utils")
        + short("_rebuild_tensor_v2")
        + b"\x93("
        + stored
        + tz.number(0)
        + tz.number(6)
        + b"\x85"
        + tz.number(1)
        + b"\x85\x89}tR"
    )
    found = read_program(tmp_path, b"}" + short("x") + rebuilt + b"s", {"0": FLOATS.tobytes()})
    np.testing.assert_array_equal(found["x"], FLOATS)


# What is not done -----------------------------------------------------------------------------------------------


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "function, name",
    [
        (os.system, "system"),
        (eval, "eval"),
        (exec, "exec"),
        (open, "open"),
        (getattr, "getattr"),
        (np.array, "array"),
        (pickle.loads, "loads"),
    ],
)
def test_nothing_is_run(tmp_path, function, name, nested, protocol):
    marker = tmp_path / "marker"
    arguments = {
        eval: f"open({str(marker)!r}, 'w')",
        exec: f"open({str(marker)!r}, 'w')",
        open: str(marker),
        os.system: f"touch {marker}",
    }
    call = Calls(function, arguments.get(function, "x"), *(["w"] if function is open else []))
    content = pickle.dumps({"x": [call]} if nested else call, protocol)
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        archive.writestr("archive/data.pkl", content)
    # If the call is nested deeply, an instruction of the list around it is refused first.
    refused(
        tmp_path / "a.bin",
        ", which no dict of tensors needs: the file may be an attempt to run code. Nothing in it was run. Ask for a "
        "safetensors file instead.",
    )
    assert not marker.exists()
    if not nested and protocol > 1:
        refused(tmp_path / "a.bin", f".{name}, which no dict of tensors needs")


def test_the_marker_would_be_made_by_pickle(tmp_path):
    # Otherwise the test above could pass because the attack does not work.
    pickle.loads(pickle.dumps(Calls(os.system, f"touch {tmp_path / 'marker'}")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "value, what",
    [
        (tz.named("torch", "load"), "torch.load"),
        (tz.named("torch", "ByteStorage"), "torch.ByteStorage"),
        (tz.named("torch._utils", "_rebuild_tensor"), "torch._utils._rebuild_tensor"),
        (tz.named("collections", "defaultdict"), "collections.defaultdict"),
        (b"]", "the instruction EMPTY_LIST"),
        (tz.named("torch", "BFloat16Storage") + tz.items([("names", b"N")]) + b"b", "the instruction BUILD"),
        (tz.named("torch._utils", "_rebuild_tensor_v2") + b"N}" + b"\x86b", "the instruction BUILD"),
        (b"(ios\nsystem\n", "the instruction INST"),
        (b"(cos\nsystem\no", "os.system"),
        (b"\x82\x01", "the instruction EXT1"),
        (tz.named("collections", "OrderedDict") + b")\x81", "the instruction NEWOBJ"),
        (b"\x8e\x01\x00\x00\x00\x00\x00\x00\x00x", "the instruction BINBYTES8"),
    ],
)
def test_other_names_and_instructions_are_refused(tmp_path, value, what):
    tz.write(tmp_path / "a.bin", value)
    refused(tmp_path / "a.bin", f" asks for {what}, which no dict of tensors needs")


def test_the_shared_dtype_cannot_be_changed(tmp_path):
    # Python's own machine would call numpy.dtype.__setstate__ on the object that all of mindlora compares with.
    before = str(BFLOAT16)
    state = tz.group(tz.number(3), tz.text("<"), b"N", b"N", b"N", tz.number(2), tz.number(1), tz.number(0))
    tz.write(tmp_path / "a.bin", tz.named("torch", "BFloat16Storage") + state + b"b")
    refused(tmp_path / "a.bin", "the instruction BUILD")
    assert str(BFLOAT16) == before


STORED = tz.storage("FloatStorage", "0", 6)


def bomb(depth=26):
    """A tuple of two tuples of two tuples ...: visiting all takes 2 ** depth steps, which is seconds, not forever."""
    return b")" + b"".join(bytes([*b"q", i, *b"h", i, 0x86]) for i in range(depth))


@pytest.mark.parametrize(
    "value, message",
    [
        (tz.rebuilt(STORED, (2**40,), (1,)), "does not fit into 6 elements"),
        (tz.rebuilt(STORED, (2**40,), (0,)), "does not fit into 6 elements"),
        (tz.rebuilt(STORED, (2**33, 2**33), (0, 0)), "does not fit into 6 elements"),
        (tz.rebuilt(STORED, (7,), (1,)), "does not fit into 6 elements"),
        (tz.rebuilt(STORED, (6,), (1,), 1), "does not fit into 6 elements"),
        (tz.rebuilt(STORED, (2, 2), (5, 1)), "does not fit into 6 elements"),
        (tz.rebuilt(STORED, (2,), (2**62,)), "does not fit into 6 elements"),
        (tz.rebuilt(STORED, (2,), (-1,), 5), "a tensor does not fit into its storage"),
        (tz.rebuilt(STORED, (2,), (1,), -1), "a tensor does not fit into its storage"),
        (tz.rebuilt(STORED, (-2,), (1,)), "a tensor does not fit into its storage"),
        (tz.rebuilt(STORED, (2, 2), (1,)), "a tensor does not fit into its storage"),
        (tz.rebuilt(STORED, (1,) * 33, (1,) * 33), "a tensor does not fit into its storage"),
        (
            tz.call(tz.named("torch._utils", "_rebuild_tensor_v2"), STORED, tz.number(0), bomb(), tz.group()),
            "a tensor does not fit into its storage",
        ),
        (tz.rebuilt(tz.storage("FloatStorage", "0", 7), (6,), (1,)), "storage 0 has 24 bytes and not the 7 elements"),
        (tz.rebuilt(tz.storage("HalfStorage", "0", 6), (6,), (1,)), "storage 0 has 24 bytes and not the 6 elements"),
        (tz.rebuilt(tz.storage("FloatStorage", "1", 6), (6,), (1,)), "There is no item named 'archive/data/1'"),
        (tz.rebuilt(tz.storage("FloatStorage", "../data.pkl", 6), (6,), (1,)), "There is no item named"),
        (
            tz.group(bomb(), tz.named("torch", "FloatStorage"), tz.text("0"), tz.text("cpu"), tz.number(6)) + b"Q",
            "it names a storage in a way that torch.save does not",
        ),
        (
            tz.group(tz.text("storage"), tz.named("torch", "FloatStorage"), bomb(), tz.text("cpu"), tz.number(6))
            + b"Q",
            "it names a storage in a way that torch.save does not",
        ),
        (
            tz.group(tz.text("storage"), tz.named("torch", "FloatStorage"), tz.text("0"), tz.text("cpu"), bomb())
            + b"Q",
            "it names a storage in a way that torch.save does not",
        ),
        (bomb() + tz.text("x") + b"\x93", "it names no function"),
        (b"}" + bomb() + b"Ns", "it sets items in something that is not a dict by name"),
        (b"}(NNu", "it sets items in something that is not a dict by name"),
        (STORED + tz.text("x") + b"Ns", "it sets items in something that is not a dict by name"),
        (tz.text("system") + tz.group(tz.text("x")) + b"R", "it calls something that is not a function"),
        (
            tz.call(tz.named("collections", "OrderedDict"), tz.group(tz.group(tz.text("x"), b"N"))),
            "it calls something that is not a function",
        ),
        (tz.call(tz.named("torch", "FloatStorage"), b"N"), "it calls something that is not a function"),
        (b"r\xff\xff\xff\x7f", "IndexError"),
        (b"N\x87", "it takes more from the stack than is there"),
        (b"h\x09", "KeyError"),
        (b"t", "IndexError"),
        (b"X\xff\xff\xff\x7fab", "ValueError: expected 2147483647 bytes"),
        (b"\xff", "at position"),
        (tz.tensor(FLOATS, "0") + b"R", "does not hold a dict of tensors: "),
    ],
)
def test_programs_that_fail(tmp_path, value, message):
    tz.write(tmp_path / "a.bin", value, {"0": FLOATS.tobytes()})
    begin = time.process_time()
    refused(tmp_path / "a.bin", message)
    assert time.process_time() - begin < 1


def test_a_memo_index_of_two_billion_takes_no_memory(tmp_path):
    # Python's own machine would allocate a table of that length.
    found = read_program(
        tmp_path, b"}r\xff\xff\xff\x7f" + tz.text("x") + tz.tensor(FLOATS, "0") + b"s", {"0": FLOATS.tobytes()}
    )
    np.testing.assert_array_equal(found["x"], FLOATS)


def test_a_small_file_cannot_become_large(tmp_path):
    array = np.zeros((250, 200), np.float32)
    view = tz.rebuilt(tz.storage("FloatStorage", "0", array.size), (200, 250), (1, 200))
    tz.write(tmp_path / "a.bin", tz.items((str(i), view) for i in range(300)), {"0": array.tobytes()})
    refused(tmp_path / "a.bin", "its tensors are many times larger than the file")
    contiguous = tz.tensor(array, "0")
    tz.write(tmp_path / "a.bin", tz.items((str(i), contiguous) for i in range(300)), {"0": array.tobytes()})
    found = torch_pickle.read(str(tmp_path / "a.bin"))
    assert len(found) == 300 and len({each.__array_interface__["data"][0] for each in found.values()}) == 1


@pytest.mark.parametrize(
    "value, kind",
    [
        (tz.number(5), "int"),
        (tz.group(tz.tensor(FLOATS, "0")), "tuple"),
        (tz.tensor(FLOATS, "0"), "ndarray"),
        (tz.items([("x", tz.number(1))]), "dict"),
        (tz.items([("x", tz.items([("y", tz.tensor(FLOATS, "0"))]))]), "dict"),
    ],
)
def test_other_contents_are_refused(tmp_path, value, kind):
    tz.write(tmp_path / "a.bin", value, {"0": FLOATS.tobytes()})
    refused(tmp_path / "a.bin", f"does not hold a dict of tensors by name, but a {kind}.")


# The archive ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.pkl", "data/0", "byteorder"])
def test_compressed_entries_are_refused(tmp_path, name):
    tz.write(tmp_path / "a.bin", tz.items([("x", tz.tensor(FLOATS, "0"))]), {"0": FLOATS.tobytes()}, compressed=[name])
    refused(tmp_path / "a.bin", f"does not hold a dict of tensors: ValueError: archive/{name} is compressed.")


def test_big_endian_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        archive.writestr("a/data.pkl", tz.program(tz.items([])))
        archive.writestr("a/byteorder", b"big")
    refused(tmp_path / "a.bin", "its bytes are not in little-endian order")


def test_other_archives_are_refused(tmp_path):
    for names in ([], ["model.safetensors"], ["a/data.pkl", "b/data.pkl"], ["data.pkl"]):
        with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
            for name in names:
                archive.writestr(name, b"x")
        refused(tmp_path / "a.bin", "is a zip archive that does not hold one data.pkl, as torch.save writes it.")


def test_other_files_are_refused(tmp_path):
    # Before PyTorch 1.6: pickles one after the other.
    (tmp_path / "a.bin").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2))
    refused(tmp_path / "a.bin", "is not what torch.save writes since PyTorch 1.6: ")
    (tmp_path / "a.bin").write_bytes(b"")
    refused(tmp_path / "a.bin", "is not what torch.save writes since PyTorch 1.6: ")
    with pytest.raises(FileNotFoundError):
        torch_pickle.read(str(tmp_path / "absent.bin"))


def test_a_cut_anywhere_is_noticed(tmp_path):
    path = tmp_path / "a.bin"
    tz.save(path, {"x": FLOATS, "y": FLOATS[:2]})
    whole = path.read_bytes()
    for cut in range(2, len(whole)):
        path.write_bytes(whole[:cut])
        refused(path, "is truncated or damaged: ", TruncatedAdapterError)


def test_a_changed_byte_of_a_storage_is_noticed(tmp_path):
    path = tmp_path / "a.bin"
    tz.save(path, {"x": FLOATS})
    whole = path.read_bytes()
    begin = whole.index(FLOATS.tobytes())
    path.write_bytes(whole[:begin] + b"\x01" + whole[begin + 1 :])
    refused(path, "is truncated or damaged: Bad CRC-32", TruncatedAdapterError)
