"""MindSpore's .ckpt files as NumPy arrays, and back: read and written without MindSpore.

A file is one protobuf message, Checkpoint in mindspore/train/checkpoint.proto: a sequence of named tensors.
"""

import binascii
import math
from typing import BinaryIO, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.core.formats import protobuf
from mindlora.core.numerics.dtypes import BFLOAT16

# MindSpore loads a .ckpt that was cut between two records without an error. So the first record that write puts into a
# file says that there must be a last one, the text.
_FIRST = "mindlora_begin"
_METADATA = "mindlora"
_DTYPES: Dict[str, np.dtype] = {
    "Float64": np.dtype("<f8"),
    "Float32": np.dtype("<f4"),
    "Float16": np.dtype("<f2"),
    "BFloat16": BFLOAT16,
    "Int64": np.dtype("<i8"),
    "Int32": np.dtype("<i4"),
    "Int16": np.dtype("<i2"),
    "Int8": np.dtype("i1"),
    "UInt64": np.dtype("<u8"),
    "UInt32": np.dtype("<u4"),
    "UInt16": np.dtype("<u2"),
    "UInt8": np.dtype("u1"),
    "Bool": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHECKSUM = b"crc_num"  # Before the last 10 bytes of a file that was saved with crc_check.
_MAX_AXES = 32  # NumPy's limit.
_PIECE_BYTES = 2**29  # MindSpore divides a larger tensor among several records.

# Field numbers of Checkpoint, of Checkpoint.Value and of TensorProto.
_VALUE = 1
_TAG, _TENSOR = 1, 2
_DIMS, _TYPE, _CONTENT = 1, 2, 3


class _Tensor(NamedTuple):
    """A record, or one piece of a large tensor."""

    dims: Tuple[int, ...]
    dtype: str
    content: memoryview


def read(path: str, wanted: Callable[[str], bool]) -> Tuple[Dict[str, np.ndarray], str]:
    """Returns the tensors whose names are ``wanted``, and the text that write stored with them, or "".

    mindspore.load_checkpoint is not used: if a record has more or fewer bytes than its shape needs, it writes past the
    end of its memory or returns values that are not in the file. All of the file is in memory while it is read.

    Raises AdapterError if the file is cut off, is not a checkpoint, or has a tensor twice or an unknown dtype.
    """
    records = _records(path, wanted)
    begun = records.pop(_FIRST, None)
    metadata = records.pop(_METADATA, None)
    if begun and not metadata:
        raise TruncatedAdapterError(f"{path} is truncated: its last record is missing. Copy or save it again.")
    return {key: _array(key, tensors, path) for key, tensors in records.items()}, _text(metadata, path)


def shapes(path: str) -> Dict[str, Tuple[int, ...]]:
    """Returns the shapes of the tensors by name, without reading the tensors; raises as ``read`` does."""
    try:
        content = memoryview(np.memmap(path, np.uint8, "r"))
        return _shapes(content[:-17] if content[-17:-10] == _CHECKSUM else content)
    # An empty file cannot be mapped, and a name that is not UTF-8 is a ValueError too.
    except ValueError as error:
        raise TruncatedAdapterError(
            f"{path} is truncated or not a MindSpore checkpoint: {error}. Copy or save it again."
        ) from error


def _shapes(content: memoryview) -> Dict[str, Tuple[int, ...]]:
    shapes = {}
    for field in protobuf.fields(content):
        if field.field == _VALUE:
            name, tensor = _parsed(field.content)
            shapes[name] = tensor.dims
    return shapes


def write(path: str, tensors: Dict[str, np.ndarray], metadata: str) -> None:
    """Writes a .ckpt in one atomic step; ``read`` returns ``metadata`` unchanged."""
    with atomic.replace_file(path) as written, open(written, "wb") as file:
        _write_arrays(file, [(_FIRST, np.array(1, "<i4")), *tensors.items()])
        _write_record(file, _METADATA, "str", (0,), np.array(metadata))


def write_arrays(path: str, arrays: Iterable[Tuple[str, np.ndarray]]) -> None:
    """Writes (name, array) pairs as one .ckpt, with one array in memory at a time; the bytes are MindSpore's own."""
    with open(path, "wb") as file:
        _write_arrays(file, arrays)


def _write_arrays(file: BinaryIO, arrays: Iterable[Tuple[str, np.ndarray]]) -> None:
    for name, array in arrays:
        pieces = (
            np.array_split(array, math.ceil(array.nbytes / _PIECE_BYTES)) if array.nbytes > _PIECE_BYTES else [array]
        )
        for piece in pieces:
            _write_record(file, name, _NAMES[array.dtype], array.shape, piece)


def _write_record(file: BinaryIO, name: str, dtype: str, shape: Tuple[int, ...], array: np.ndarray) -> None:
    # Each message begins with its size, so the bytes before the elements are built first, and no element is copied.
    dims = b"".join(protobuf.number(_DIMS, size) for size in shape)
    tensor = dims + protobuf.content(_TYPE, dtype.encode()) + protobuf.head(_CONTENT, array.nbytes)
    value = protobuf.content(_TAG, name.encode()) + protobuf.head(_TENSOR, len(tensor) + array.nbytes) + tensor
    file.write(protobuf.head(_VALUE, len(value) + array.nbytes) + value)
    file.write(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


def _records(path: str, wanted: Callable[[str], bool]) -> Dict[str, List[_Tensor]]:
    """Returns name -> the pieces of its tensor; a small tensor has one."""
    with open(path, "rb") as file:
        content = file.read()
    if not content:
        raise TruncatedAdapterError(f"{path} is truncated: it is empty. Copy or save it again.")
    if content[-17:-10] == _CHECKSUM:
        content, checksum = content[:-17], int.from_bytes(content[-10:], "big")
        if checksum != binascii.crc32(content):
            raise TruncatedAdapterError(
                f"{path} is damaged: its checksum does not match its content. Copy or save it again."
            )
    records: Dict[str, List[_Tensor]] = {}
    before = None
    try:
        for field in protobuf.fields(memoryview(content)):
            if field.field != _VALUE:
                continue
            name, tensor = _parsed(field.content)
            if name in (_FIRST, _METADATA) or wanted(name):
                if name in records and name != before:
                    raise AdapterFormatError(f"{path} has {name} twice, so it is unclear which one counts. Remove one.")
                records.setdefault(name, []).append(tensor)
            before = name
    except AdapterFormatError:
        raise
    # A name that is not UTF-8 is a ValueError too.
    except ValueError as error:
        raise TruncatedAdapterError(
            f"{path} is truncated or not a MindSpore checkpoint: {error}. Copy or save it again."
        ) from error
    return records


def _parsed(value: memoryview) -> Tuple[str, _Tensor]:
    """Returns the name and the tensor of one Checkpoint.Value."""
    parts = {part.field: part.content for part in protobuf.fields(value) if part.wire_type == protobuf.CONTENT}
    dims = []
    values = {}
    for part in protobuf.fields(parts.get(_TENSOR, memoryview(b""))):
        if part.field == _DIMS and part.wire_type == protobuf.NUMBER:
            # An int64: the upper half of the range is negative.
            dims.append(part.value - 2**64 if part.value >= 2**63 else part.value)
        elif part.wire_type == protobuf.CONTENT:
            values[part.field] = part.content
    if _TAG not in parts or not {_TYPE, _CONTENT} <= values.keys():
        raise ValueError("a record lacks its name, its dtype or its content")
    return str(parts[_TAG], "utf-8"), _Tensor(tuple(dims), str(values[_TYPE], "utf-8"), values[_CONTENT])


def _array(key: str, tensors: List[_Tensor], path: str) -> np.ndarray:
    name = tensors[-1].dtype
    shape = tensors[-1].dims
    if name not in _DTYPES:
        raise AdapterFormatError(
            f"{path}: {key} is stored as {name}, which is not supported: save it as one of {', '.join(_DTYPES)}."
        )
    shape = () if shape == (0,) else shape  # MindSpore writes some scalars this way.
    content = b"".join(tensor.content for tensor in tensors)
    if len(shape) > _MAX_AXES or min(shape, default=1) < 1 or math.prod(shape) * _DTYPES[name].itemsize != len(content):
        raise TruncatedAdapterError(
            f"{path} is truncated or damaged: {key} is {name} {list(shape)} in {len(content)} "
            "bytes. Copy or save it again."
        )
    return np.frombuffer(content, _DTYPES[name]).reshape(shape)


def _text(tensors: Optional[List[_Tensor]], path: str) -> str:
    if not tensors:
        return ""
    try:
        # NumPy stores texts as UTF-32.
        return b"".join(tensor.content for tensor in tensors).decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise TruncatedAdapterError(
            f"{path} is truncated or damaged: its last record is not text. Copy or save it again."
        ) from error
