"""Writes what torch.save writes, without torch: the zip archive, and its pickle built instruction by instruction."""

import struct
import zipfile

import numpy as np

from mindlora.core.numerics.dtypes import BFLOAT16

STORAGES = {
    "<f8": "DoubleStorage",
    "<f4": "FloatStorage",
    "<f2": "HalfStorage",
    "<i8": "LongStorage",
    "<i4": "IntStorage",
}


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value):
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def named(module, name):
    return f"c{module}\n{name}\n".encode()


def group(*parts):
    return b"(" + b"".join(parts) + b"t"


def call(function, *arguments):
    return function + group(*arguments) + b"R"


def items(pairs):
    """A dict of (key, program of the value)."""
    return b"}(" + b"".join(text(key) + value for key, value in pairs) + b"u"


def program(value):
    return b"\x80\x02" + value + b"."


def storage(kind, key, count):
    return group(text("storage"), named("torch", kind), text(key), text("cpu"), number(count)) + b"Q"


def rebuilt(stored, shape, strides, offset=0):
    return call(
        named("torch._utils", "_rebuild_tensor_v2"),
        stored,
        number(offset),
        group(*map(number, shape)),
        group(*map(number, strides)),
        b"\x89",
        named("collections", "OrderedDict") + b")R",
    )


def tensor(array, key):
    """The program of one contiguous tensor with its own storage."""
    kind = "BFloat16Storage" if array.dtype == BFLOAT16 else STORAGES[array.dtype.str]
    strides = [stride // array.itemsize for stride in np.empty(array.shape, array.dtype).strides]
    return rebuilt(storage(kind, key, array.size), array.shape, strides)


def write(path, value, storages=(), folder="archive", compressed=()):
    """Writes an archive with a program and with the bytes of its storages by key."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in [
            ("data.pkl", program(value)),
            ("byteorder", b"little"),
            *((f"data/{key}", content) for key, content in dict(storages).items()),
            ("version", b"3\n"),
        ]:
            archive.writestr(
                f"{folder}/{name}", content, zipfile.ZIP_DEFLATED if name in compressed else zipfile.ZIP_STORED
            )


def save(path, arrays):
    """What torch.save writes for a dict of tensors that share no storage."""
    write(
        path,
        items((key, tensor(array, str(i))) for i, (key, array) in enumerate(arrays.items())),
        {str(i): array.tobytes() for i, array in enumerate(arrays.values())},
    )
