"""Safetensors files, read and written tensor by tensor in the stored dtype, bfloat16 included.

The safetensors library decides whether a file is sound. It does not read and write the tensors here, because it has no
bfloat16 for NumPy and takes all tensors at once for writing.
"""

import functools
import json
import math
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import numpy as np
from safetensors import SafetensorError, safe_open

from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.core.json_files import refuse_duplicates
from mindlora.core.numerics.dtypes import BFLOAT16, FLOAT8_E4M3

_DTYPES: Dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
# Only callers that decode weights of a base read it.
_FLOAT8 = {"F8_E4M3": FLOAT8_E4M3}
_NAMES = {dtype: name for name, dtype in {**_DTYPES, **_FLOAT8}.items()}

# NumPy's limits.
_MAX_AXES = 32
_MAX_ELEMENTS = 2**59
# Parts of the library's messages about missing bytes.
_TRUNCATED = ("too small", "invalid header length", "not fully covered")


class TensorInfo(NamedTuple):
    """The place of a tensor in a file: ``offset`` bytes from its beginning."""

    dtype: np.dtype
    shape: Tuple[int, ...]
    offset: int
    size: int


class TensorFile:
    """A safetensors file that is open for reading; use it in a ``with`` statement. Several threads may read at once.

    Its tensors are in the order of their bytes; ``metadata`` holds the strings of its header. Raises AdapterError if it
    is cut off or not a safetensors file, or has a tensor twice or an unknown dtype.

    With ``mapped``, arrays lie in the file: its pages come into memory when they are used, and processes share
    them. Writes to such an array stay in this process. The file must not be written to while the arrays exist.

    Tensors in float8 (E4M3) are an error unless ``float8`` says that the caller decodes them.
    """

    def __init__(self, path: str, mapped: bool = False, float8: bool = False):
        self.path = str(path)
        self.tensors, self.metadata = _read_header(self.path, {**_DTYPES, **(_FLOAT8 if float8 else {})})
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed on __exit__)
        self._map = np.memmap(self.path, np.uint8, "c") if mapped else None

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, key: str) -> np.ndarray:
        """Returns one tensor in its stored dtype; raises TruncatedAdapterError if the file has become shorter."""
        info = self.tensors[key]
        return self._array(info.shape, info.dtype, info.offset)

    def read_rows(self, key: str, begin: int, end: int) -> np.ndarray:
        """Returns rows [begin, end) of a tensor along its first axis, as ``read`` does; a scalar counts as one row."""
        info = self.tensors[key]
        if not info.shape:
            return self.read(key)
        row = info.size // max(info.shape[0], 1)
        return self._array((end - begin,) + info.shape[1:], info.dtype, info.offset + begin * row)

    def read_columns(self, key: str, begin: int, end: int) -> np.ndarray:
        """Returns a copy of columns [begin, end) of a matrix; only the pages that hold them are read."""
        info = self.tensors[key]
        # Beyond the end of a file, a mapped page would kill the process.
        self._check_there(os.fstat(self._file.fileno()).st_size >= info.offset + info.size)
        return np.ndarray(info.shape, info.dtype, self._pages, info.offset)[:, begin:end].copy()

    @functools.cached_property
    def _pages(self) -> np.ndarray:
        return np.memmap(self._file, np.uint8, "r") if self._map is None else self._map

    def _array(self, shape: Tuple[int, ...], dtype: np.dtype, offset: int) -> np.ndarray:
        if self._map is not None:
            return np.ndarray(shape, dtype, self._map, offset)
        array = np.empty(shape, dtype)
        self._fill(memoryview(array.reshape(-1).view(np.uint8)), offset)
        return array

    def _fill(self, view, offset):
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            self._check_there(count > 0)
            done += count

    def _check_there(self, is_there: bool) -> None:
        if not is_there:
            raise TruncatedAdapterError(
                f"{self.path} became shorter while it was read. Try again when nothing writes to it any more."
            )


def layout(
    entries: List[Tuple[str, np.dtype, Tuple[int, ...]]], metadata: Optional[Dict[str, str]] = None
) -> Tuple[bytes, List[int], int]:
    """Returns a safetensors file's header, the offset of each tensor in it, and its size, in bytes.

    Each entry is (key, dtype, shape).
    """
    header: Dict[str, Any] = {}
    offset = 0
    if metadata:
        header["__metadata__"] = metadata
    for key, dtype, shape in entries:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        header[key] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    return text, [len(text) + header[key]["data_offsets"][0] for key, _, _ in entries], len(text) + offset


def write(
    path: str,
    entries: List[Tuple[str, np.dtype, Tuple[int, ...]]],
    contents: Iterable[np.ndarray],
    metadata: Optional[Dict[str, str]] = None,
) -> None:
    """Writes a safetensors file piece by piece, with one piece in memory at a time; an existing one is overwritten.

    ``entries`` is as in ``layout``, and ``contents`` yields the tensors' elements in that order, in any pieces.
    """
    text, _, end = layout(entries, metadata)
    with open(path, "wb") as file:
        file.write(text)
        written = len(text)
        for piece in contents:
            piece = np.ascontiguousarray(piece)
            file.write(memoryview(piece.reshape(-1).view(np.uint8)))
            written += piece.nbytes
    if written != end:
        raise AssertionError(f"{path}: {written} bytes were written, but the header declares {end}.")


def write_arrays(path: str, tensors: Dict[str, np.ndarray], metadata: Optional[Dict[str, str]] = None) -> None:
    """Writes arrays, sorted by their keys."""
    keys = sorted(tensors)
    write(
        path, [(key, tensors[key].dtype, tensors[key].shape) for key in keys], (tensors[key] for key in keys), metadata
    )


def _read_header(path: str, dtypes: Dict[str, np.dtype]) -> Tuple[Dict[str, TensorInfo], Dict[str, str]]:
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        size = os.path.getsize(path)
        if any(sign in str(error) for sign in _TRUNCATED):
            raise TruncatedAdapterError(
                f"{path} is truncated or damaged: its {size} bytes are not what its header "
                f"declares ({error}). Copy or save it again."
            ) from error
        raise AdapterFormatError(f"{path} is not a safetensors file: {error}. Copy or save it again.") from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length), object_pairs_hook=refuse_duplicates(path, AdapterFormatError))
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    odd = [key for key, entry in header.items() if not isinstance(entry, dict)]
    if odd:
        # The library's reader also accepts a list [dtype, shape, offsets].
        raise AdapterFormatError(
            f"{path} is not a safetensors file: the entry of {odd[0]} in its header is not an object. Save it again."
        )
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in dtypes:
            raise AdapterFormatError(
                f"{path}: {key} is stored as {entry['dtype']}, which is not supported: save it as one of "
                f"{', '.join(dtypes)}."
            )
        if len(entry["shape"]) > _MAX_AXES or math.prod(size or 1 for size in entry["shape"]) > _MAX_ELEMENTS:
            # An empty tensor can declare any size along its other axes.
            raise AdapterFormatError(
                f"{path}: {key} is {entry['shape']}, which is not a valid array shape. Copy or save the file again."
            )
        begin, end = entry["data_offsets"]
        tensors[key] = TensorInfo(dtypes[entry["dtype"]], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return tensors, metadata
