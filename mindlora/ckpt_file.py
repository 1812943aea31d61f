"""MindSpore's .ckpt files as NumPy arrays, and arrays as MindSpore's tensors: the one reader that imports MindSpore."""
import binascii
import math
from typing import Callable, Dict, Tuple

import mindspore as ms
import numpy as np
from google.protobuf.message import DecodeError
from mindspore.train.checkpoint_pb2 import Checkpoint

from mindlora import atomic
from mindlora.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.tensor_file import BFLOAT16, to_float32

# A .ckpt that was cut between two records loads without a word: of ours, the first record says that the last one,
# a text, must be there.
_FIRST = "mindlora_begin"
_FACTS = "mindlora"
_DTYPES = {"Float64": np.dtype("<f8"), "Float32": np.dtype("<f4"), "Float16": np.dtype("<f2"), "BFloat16": BFLOAT16,
           "Int64": np.dtype("<i8"), "Int32": np.dtype("<i4"), "Int16": np.dtype("<i2"), "Int8": np.dtype("i1"),
           "UInt64": np.dtype("<u8"), "UInt32": np.dtype("<u4"), "UInt16": np.dtype("<u2"), "UInt8": np.dtype("u1"),
           "Bool": np.dtype("?")}
_CHECKSUM = b"crc_num"  # Before the last 10 bytes of a file that was saved with crc_check.
_MAX_AXES = 32  # NumPy's.


def read(path: str, wanted: Callable[[str], bool]) -> Tuple[Dict[str, np.ndarray], str]:
    """Returns the tensors whose names are ``wanted``, and the text that write put beside them, or "".

    mindspore.load_checkpoint is not asked: where a record holds more or fewer bytes than its shape takes, it writes
    past the end of its memory, or makes up the rest.

    Raises:
        TruncatedAdapterError: The file ends before its content does, or is no MindSpore checkpoint.
        AdapterFormatError: A tensor is there twice or in a dtype that is not known.
    """
    records = _records(path, wanted)
    begun, facts = records.pop(_FIRST, None), records.pop(_FACTS, None)
    if begun and not facts:
        raise TruncatedAdapterError(f"{path} is truncated: its last record is missing. Copy or save it again.")
    return {key: _array(key, tensors, path) for key, tensors in records.items()}, _text(facts, path)


def write(path: str, tensors: Dict[str, np.ndarray], facts: str) -> None:
    """Writes arrays and a text as one .ckpt, in one step."""
    content = [{"name": _FIRST, "data": ms.Tensor(1, ms.int32)}]
    content += [{"name": key, "data": to_tensor(array)} for key, array in tensors.items()]
    with atomic.replace_file(path) as written:
        ms.save_checkpoint(content, written, append_dict={_FACTS: facts})


def to_tensor(array: np.ndarray) -> ms.Tensor:
    """Returns ``array`` as a MindSpore tensor of the same dtype."""
    if array.dtype == BFLOAT16:
        return ms.Tensor(to_float32(array), ms.bfloat16)
    return ms.Tensor(np.ascontiguousarray(array))


def to_array(tensor: ms.Tensor) -> np.ndarray:
    """Returns a MindSpore tensor as an array of the same dtype, bfloat16 as tensor_file.BFLOAT16."""
    array = tensor.asnumpy()
    return array.view(np.uint16).view(BFLOAT16) if tensor.dtype == ms.bfloat16 else array


def _records(path, wanted) -> Dict[str, list]:
    """Returns name -> the pieces of its tensor, which is in several where it is large."""
    with open(path, "rb") as file:
        content = file.read()
    if not content:
        raise TruncatedAdapterError(f"{path} is truncated: it is empty. Copy or save it again.")
    if content[-17:-10] == _CHECKSUM:
        content, checksum = content[:-17], int.from_bytes(content[-10:], "big")
        if checksum != binascii.crc32(content):
            raise TruncatedAdapterError(f"{path} is damaged: its checksum is that of other bytes. Copy or save it "
                                        "again.")
    checkpoint = Checkpoint()
    try:
        checkpoint.ParseFromString(content)
    # A name that is no UTF-8 is a ValueError.
    except (DecodeError, ValueError, RecursionError) as error:
        raise TruncatedAdapterError(f"{path} is truncated or no MindSpore checkpoint: {error}") from error
    records, before = {}, None
    for record in checkpoint.value:
        if record.tag in (_FIRST, _FACTS) or wanted(record.tag):
            if record.tag in records and record.tag != before:
                raise AdapterFormatError(f"{path} names {record.tag} twice: which of the two counts is not said.")
            records.setdefault(record.tag, []).append(record.tensor)
        before = record.tag
    return records


def _array(key, tensors, path) -> np.ndarray:
    name, shape = tensors[-1].tensor_type, tuple(tensors[-1].dims)
    if name not in _DTYPES:
        raise AdapterFormatError(f"{path}: {key} is stored as {name}, which is not supported. Known: "
                                 f"{', '.join(_DTYPES)}.")
    shape = () if shape == (0,) else shape  # So MindSpore writes a scalar.
    content = b"".join(tensor.tensor_content for tensor in tensors)
    if len(shape) > _MAX_AXES or min(shape, default=1) < 1 or math.prod(shape) * _DTYPES[name].itemsize != len(content):
        raise TruncatedAdapterError(f"{path} is truncated or damaged: {key} is {name} {list(shape)} in {len(content)} "
                                    "bytes. Copy or save it again.")
    return np.frombuffer(content, _DTYPES[name]).reshape(shape)


def _text(tensors, path) -> str:
    if not tensors:
        return ""
    try:
        # As NumPy keeps texts.
        return b"".join(tensor.tensor_content for tensor in tensors).decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise TruncatedAdapterError(f"{path} is truncated or damaged: its last record is no text. Copy or save it "
                                    "again.") from error
