"""Reads PyTorch's .bin files without PyTorch and without running their code."""

import pickletools
import zipfile
from typing import Any, Callable, Dict, List, NoReturn, Sequence, Tuple

import numpy as np

from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.core.numerics.dtypes import BFLOAT16

_STORAGES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": BFLOAT16,
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}
_MAX_AXES = 32  # NumPy's limit.


def read(path: str) -> Dict[str, np.ndarray]:
    """Returns the tensors of a file that torch.save wrote from a dict of tensors.

    A pickle is a program for a stack machine. Python's own machine is not used, since a program can make it call any
    function, change any object and allocate any amount of memory. The machine here knows the few instructions that a
    dict of tensors needs, can call three functions of its own, and stops at anything else.

    Raises AdapterError if it is damaged, not a zip archive that torch.save wrote, or not a dict of named tensors.
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
        with open(path, "rb") as file:
            begins_as_zip = file.read(2) == b"PK"
        if begins_as_zip:
            raise TruncatedAdapterError(f"{path} is truncated or damaged: {error}. Copy or save it again.") from error
        raise AdapterFormatError(
            f"{path} is not what torch.save writes since PyTorch 1.6: {error}. Save the adapter "
            "with safe_serialization=True, as safetensors."
        ) from error
    # A damaged program can raise any exception.
    except Exception as error:
        if not opened:
            raise
        raise AdapterFormatError(
            f"{path} does not hold a dict of tensors: {type(error).__name__}: {error}. Save the adapter as safetensors."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, np.ndarray) for value in content.values()):
        raise AdapterFormatError(
            f"{path} does not hold a dict of tensors by name, but a {type(content).__name__}. Give the file of the "
            "adapter."
        )
    return content


class _Machine:
    """Runs the program of one archive; its tensors become arrays."""

    def __init__(self, archive: zipfile.ZipFile, path: str):
        entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
        if len(entries) != 1:
            raise AdapterFormatError(
                f"{path} is a zip archive that does not hold one data.pkl, as torch.save writes it. "
                "Give the file of the adapter."
            )
        self._archive = archive
        self._path = path
        self._folder = entries[0].filename[: -len("data.pkl")]
        self._program = self._stored(entries[0].filename)
        if self._folder + "byteorder" in archive.namelist() and self._stored(self._folder + "byteorder") != b"little":
            raise ValueError("its bytes are not in little-endian order")
        self._storages: Dict[Tuple[str, np.dtype], np.ndarray] = {}
        self._budget = 4 * sum(entry.file_size for entry in archive.infolist())
        self._functions = (dict, self._tensor, self._parameter)
        self.stack: List[Any] = []
        self.marks: List[int] = []
        self.memo: Dict[Any, Any] = {}

    def run(self) -> Any:
        """Returns the value that the program leaves on the stack."""
        for instruction, argument, _ in pickletools.genops(self._program):
            carry_out = _INSTRUCTIONS.get(instruction.name)
            if carry_out is None:
                self._refuse(f"the instruction {instruction.name}")
            carry_out(self, argument)
        return self.stack.pop()

    # The elements of the instructions

    def push(self, value: Any) -> None:
        """Puts a value on the stack."""
        self.stack.append(value)

    def remember(self, place: Any) -> None:
        """Keeps the last value at a place, by default the next one, for instructions that use it again."""
        self.memo[len(self.memo) if place is None else place] = self.stack[-1]

    def taken(self, count: int) -> Tuple[Any, ...]:
        """Takes the last values from the stack."""
        return self._taken_from(len(self.stack) - count)

    def taken_to_mark(self) -> Tuple[Any, ...]:
        """Takes all values since the last mark from the stack."""
        return self._taken_from(self.marks.pop())

    def _taken_from(self, begin: int) -> Tuple[Any, ...]:
        if begin < 0:
            raise ValueError("it takes more from the stack than is there")
        items = tuple(self.stack[begin:])
        del self.stack[begin:]
        return items

    def set_items(self, items: Tuple[Any, ...]) -> None:
        """Sets keys and values in turn in the dict that is last on the stack."""
        target = self.stack[-1]
        # Keys must be strings: hashing a deeply nested tuple can take forever.
        if not isinstance(target, dict) or not all(isinstance(key, str) for key in items[::2]):
            raise ValueError("it sets items in something that is not a dict by name")
        target.update(zip(items[::2], items[1::2]))

    def name(self, text: Any) -> None:
        """Puts the object named "module function" on the stack."""
        module, function = str(text).split(" ")
        self.push(self._named(module, function))

    def name_from_stack(self, _: Any) -> None:
        """Like ``name``, with two values from the stack."""
        function = self.stack.pop()
        self.push(self._named(self.stack.pop(), function))

    def call(self, _: Any) -> None:
        """Calls a function with a tuple of arguments, both on the stack."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if function not in self._functions or function is dict and arguments:
            raise ValueError("it calls something that is not a function")
        self.push(function(*arguments))

    def find_storage(self, _: Any) -> None:
        """Puts the storage on the stack that a tuple there describes."""
        kind, dtype, key, _, count = self.stack.pop()
        self.push(self._storage(kind, dtype, key, count))

    def drop_versions(self, _: Any) -> None:
        """Drops the modules' versions that a state_dict records."""
        if not isinstance(self.stack[-2], dict):
            self._refuse("the instruction BUILD")
        self.stack.pop()

    def _named(self, module: Any, name: Any) -> Any:
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

    def _refuse(self, what: str) -> NoReturn:
        raise AdapterFormatError(
            f"{self._path} asks for {what}, which no dict of tensors needs: the file may "
            "be an attempt to run code. Nothing in it was run. Ask for a safetensors file instead."
        )

    def _storage(self, kind: Any, dtype: Any, key: Any, count: Any) -> np.ndarray:
        if kind != "storage" or not isinstance(dtype, np.dtype) or not isinstance(key, str) or type(count) is not int:
            raise ValueError("it names a storage in a way that torch.save does not")
        if (key, dtype) not in self._storages:
            content = self._stored(f"{self._folder}data/{key}")
            if len(content) != count * dtype.itemsize:
                raise ValueError(
                    f"storage {key} has {len(content)} bytes and not the {count} elements that are declared"
                )
            self._storages[key, dtype] = np.frombuffer(content, dtype)
        return self._storages[key, dtype]

    def _stored(self, name: str) -> bytes:
        entry = self._archive.getinfo(name)
        # torch.save does not compress; a compressed entry could unpack to any size.
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed")
        return self._archive.read(entry)

    def _tensor(
        self, storage: Any, offset: int, shape: Sequence[int], strides: Sequence[int], *_: object
    ) -> np.ndarray:
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
        # Each such tensor becomes a copy, and a small file can name one storage many times.
        self._budget -= view.nbytes
        if self._budget < 0:
            raise ValueError("its tensors are many times larger than the file")
        return np.ascontiguousarray(view)

    @staticmethod
    def _parameter(tensor: Any, *_: object) -> Any:
        return tensor


# All instructions that a dict of tensors needs, by pickletools' names -> their effect on the machine.
_INSTRUCTIONS: Dict[str, Callable[[_Machine, Any], Any]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"), _Machine.push),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: machine.push(machine.taken_to_mark()),
    "TUPLE1": lambda machine, _: machine.push(machine.taken(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.taken(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.taken(3)),
    "SETITEM": lambda machine, _: machine.set_items(machine.taken(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.taken_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, place: machine.push(machine.memo[place])),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "BINPERSID": _Machine.find_storage,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.drop_versions,
}
