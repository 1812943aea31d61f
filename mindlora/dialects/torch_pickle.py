"""Reads PyTorch's .bin files without PyTorch and without running anything that stands in them."""
import collections
import pickle
import zipfile
from typing import Dict

import numpy as np

from mindlora.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.tensor_file import BFLOAT16

_STORAGES = {"DoubleStorage": np.dtype("<f8"), "FloatStorage": np.dtype("<f4"), "HalfStorage": np.dtype("<f2"),
             "BFloat16Storage": BFLOAT16, "LongStorage": np.dtype("<i8"), "IntStorage": np.dtype("<i4")}


def read(path: str) -> Dict[str, np.ndarray]:
    """Returns the tensors of a file that torch.save wrote from a dict of tensors.

    A pickle is a program; of what it may call, this reader knows the four things that a dict of tensors takes, and ends
    at any other.

    Raises:
        AdapterFormatError: The file is no zip archive of torch.save's, asks for anything but tensors, or holds
            something else than a dict of tensors by name.
        TruncatedAdapterError: The archive is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            content = _Unpickler(archive, path).load()
    except AdapterFormatError:
        raise
    except zipfile.BadZipFile as error:
        if _begins_as_zip(path):
            raise TruncatedAdapterError(f"{path} is truncated or damaged: {error}. Copy or save it again.") from error
        raise AdapterFormatError(f"{path} is not what torch.save writes since PyTorch 1.6: {error}. Save the adapter "
                                 "with safe_serialization=True, as safetensors.") from error
    # A damaged pickle can fail in any way that a program can.
    except Exception as error:
        raise AdapterFormatError(f"{path} holds no dict of tensors: {type(error).__name__}: {error}.") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) and isinstance(value, np.ndarray)
                                                for key, value in content.items()):
        raise AdapterFormatError(f"{path} holds no dict of tensors by name, but a {type(content).__name__}.")
    return dict(content)


class _Unpickler(pickle.Unpickler):
    """Rebuilds tensors as arrays."""

    def __init__(self, archive, path):
        entries = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(entries) != 1:
            raise AdapterFormatError(f"{path} is a zip archive without the one data.pkl that torch.save puts there.")
        super().__init__(archive.open(entries[0]))
        self._archive, self._path = archive, path
        self._folder = entries[0][:-len("data.pkl")]

    def find_class(self, module, name):
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise AdapterFormatError(f"{self._path} asks for {module}.{name}, which is no part of a dict of tensors: it may "
                                 "be meant to run something. Nothing of it was run.")

    def persistent_load(self, pid):
        kind, dtype, key, _, count = pid
        entry = self._archive.getinfo(f"{self._folder}data/{key}")
        # torch.save stores; what is packed could unpack to any size.
        if kind != "storage" or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != count * dtype.itemsize:
            raise AdapterFormatError(f"{self._path}: {entry.filename} is not the {count} elements that are declared.")
        return np.frombuffer(self._archive.read(entry), dtype)


def _rebuild_tensor(storage, offset, shape, strides, *_):
    size = int(np.prod(shape, dtype=object))
    steps = [size_ - 1 for size_ in shape]
    if size > storage.size or min((offset, *shape, *strides), default=0) < 0 \
            or size and offset + sum(step * stride for step, stride in zip(steps, strides)) >= storage.size:
        raise ValueError(f"a tensor of shape {list(shape)} does not fit into {storage.size} elements")
    view = np.lib.stride_tricks.as_strided(storage[offset:], shape, [stride * storage.itemsize for stride in strides])
    return np.ascontiguousarray(view)


def _begins_as_zip(path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"
