"""Reads PyTorch's .bin files without PyTorch and without running anything that stands in them."""

import pickletools
import zipfile
from typing import Dict

import numpy as np

from mindlora.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.numerics.dtypes import BFLOAT16

_STORAGES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": BFLOAT16,
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")
_MAX_AXES = 32  # NumPy's.


def read(path: str) -> Dict[str, np.ndarray]:
    """Returns the tensors of a file that torch.save wrote from a dict of tensors.

    A pickle is a program for a machine with a stack. Python's own machine is not used: it can be made to call, to
    change, and to allocate without bound. The one here knows the few instructions that a dict of tensors takes, can
    call three functions, all its own, and ends at anything else.

    Raises:
        AdapterFormatError: The file is no zip archive of torch.save's, asks for anything but tensors, or holds
            something else than a dict of tensors by name.
        TruncatedAdapterError: The archive is damaged.
    """
    opened = False
    try:
        with open(path, "rb") as file:
            opened = True
            with zipfile.ZipFile(file) as archive:
                content = _Machine(archive, path).run()
    except AdapterFormatError:
        raise
    except zipfile.BadZipFile as error:
        if _begins_as_zip(path):
            raise TruncatedAdapterError(f"{path} is truncated or damaged: {error}. Copy or save it again.") from error
        raise AdapterFormatError(
            f"{path} is not what torch.save writes since PyTorch 1.6: {error}. Save the adapter "
            "with safe_serialization=True, as safetensors."
        ) from error
    # A damaged program can fail in any way that programs do.
    except Exception as error:
        if not opened:
            raise
        raise AdapterFormatError(f"{path} holds no dict of tensors: {type(error).__name__}: {error}.") from error
    if not isinstance(content, dict) or not all(isinstance(value, np.ndarray) for value in content.values()):
        raise AdapterFormatError(f"{path} holds no dict of tensors by name, but a {type(content).__name__}.")
    return content


class _Machine:
    """Runs the program of one archive; its tensors become arrays."""

    def __init__(self, archive, path):
        entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
        if len(entries) != 1:
            raise AdapterFormatError(f"{path} is a zip archive without the one data.pkl that torch.save puts there.")
        self._archive, self._path = archive, path
        self._folder = entries[0].filename[: -len("data.pkl")]
        self._program = self._stored(entries[0].filename)
        if self._folder + "byteorder" in archive.namelist() and self._stored(self._folder + "byteorder") != b"little":
            raise ValueError("its bytes are not in little-endian order")
        self._storages, self._budget = {}, 4 * sum(entry.file_size for entry in archive.infolist())
        self._functions = (dict, self._tensor, self._parameter)

    def run(self):
        """Returns what the program leaves on the stack."""
        stack, marks, memo = [], [], {}
        for instruction, argument, _ in pickletools.genops(self._program):
            name = instruction.name
            if name in ("PROTO", "FRAME", "STOP"):
                pass
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _LITERALS:
                stack.append(argument)
            elif name == "EMPTY_DICT":
                stack.append({})
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
                _group(stack, marks.pop() if name == "TUPLE" else len(stack) - int(name[-1]))
            elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in ("SETITEM", "SETITEMS"):
                _group(stack, marks.pop() if name == "SETITEMS" else len(stack) - 2)
                _set_items(stack.pop(), stack[-1])
            elif name == "GLOBAL":
                stack.append(self._named(*argument.split(" ")))
            elif name == "STACK_GLOBAL":
                function = stack.pop()
                stack.append(self._named(stack.pop(), function))
            elif name == "BINPERSID":
                stack.append(self._storage(*stack.pop()))
            elif name == "REDUCE":
                arguments = stack.pop()
                stack.append(self._call(stack.pop(), arguments))
            elif name == "BUILD" and isinstance(stack[-2], dict):
                stack.pop()  # What a state_dict notes of the versions of its modules.
            else:
                self._refuse(f"the instruction {name}")
        return stack.pop()

    def _named(self, module, name):
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return self._parameter
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names no function")
        return self._refuse(f"{module}.{name}")

    def _call(self, function, arguments):
        if function not in self._functions or function is dict and arguments:
            raise ValueError("it calls what is no function")
        return function(*arguments)

    def _refuse(self, what):
        raise AdapterFormatError(
            f"{self._path} asks for {what}, which is no part of a dict of tensors: it may be "
            "meant to run something. Nothing of it was run."
        )

    def _storage(self, kind, dtype, key, _, count):
        if kind != "storage" or not isinstance(dtype, np.dtype) or not isinstance(key, str) or type(count) is not int:
            raise ValueError("it names a storage in another way than torch.save")
        if (key, dtype) not in self._storages:
            content = self._stored(f"{self._folder}data/{key}")
            if len(content) != count * dtype.itemsize:
                raise ValueError(
                    f"storage {key} has {len(content)} bytes and not the {count} elements that are declared"
                )
            self._storages[key, dtype] = np.frombuffer(content, dtype)
        return self._storages[key, dtype]

    def _stored(self, name) -> bytes:
        entry = self._archive.getinfo(name)
        # torch.save stores; what is packed could unpack to any size.
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed")
        return self._archive.read(entry)

    def _tensor(self, storage, offset, shape, strides, *_):
        numbers = (offset, *shape, *strides)
        if (
            len(shape) != len(strides)
            or len(shape) > _MAX_AXES
            or not isinstance(storage, np.ndarray)
            or not all(type(number) is int and number >= 0 for number in numbers)
        ):
            raise ValueError("a tensor does not fit into its storage")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
        if np.prod(shape, dtype=object) > storage.size or 0 not in shape and last >= storage.size:
            raise ValueError(f"a tensor of shape {list(shape)} does not fit into {storage.size} elements")
        view = np.lib.stride_tricks.as_strided(
            storage[offset:], shape, [stride * storage.itemsize for stride in strides]
        )
        if view.flags.c_contiguous:
            return view
        # Each costs a copy, and a small file can name one storage very often.
        self._budget -= view.nbytes
        if self._budget < 0:
            raise ValueError("its tensors are many times larger than the file")
        return np.ascontiguousarray(view)

    @staticmethod
    def _parameter(tensor, *_):
        return tensor


def _group(stack, begin):
    """Puts the part of the stack from ``begin`` on into one tuple."""
    if begin < 0:
        raise ValueError("it takes more than is there")
    stack[begin:] = [tuple(stack[begin:])]


def _set_items(items, target):
    # Keys are texts: the hash of a tuple of tuples of tuples can take for ever.
    if not isinstance(target, dict) or not all(isinstance(key, str) for key in items[::2]):
        raise ValueError("it sets items of something else than a dict by name")
    target.update(zip(items[::2], items[1::2]))


def _begins_as_zip(path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"
