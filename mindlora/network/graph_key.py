"""A key for the graph that MindSpore compiles of a cell: where keys are equal, so are the graphs, in any process."""

import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import platform
import sys
import sysconfig
import types
from typing import Any, Callable, Dict, List, Tuple

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.common.generator import Generator

# What MindSpore notes in every cell: numbers of this process, and what it found out while it compiled.
_BOOKKEEPING = {
    *("_create_time", "_id", "_compile_cache", "_phase_cache", "_compile_phase", "compile_phase"),
    *("_compiled", "current_phase", "arguments_key", "_exist_objs", "_exist_names", "_init_flag"),
    *("_has_mutable_args_list", "sequence_modified", "_lazy_construct_sig", "__parse_method__", "is_top_cell"),
    "_is_check_and_refresh",
    # The name of the cell in messages, and the children and parameters again.
    *("_scope", "_params_list", "_primitives"),
}
_SETTINGS = ("mode", "device_target", "jit_level", "jit_config", "jit_syntax_level", "deterministic", "max_call_depth")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice, np.generic, np.dtype)
# Packages whose version, or whose files in the key, say what their functions are.
_KNOWN_BY_NAME = ("mindspore", "numpy", "builtins", *getattr(sys, "stdlib_module_names", ()))


class NoKeyError(Exception):
    """A cell holds something that no key can stand for; the message says what, and where."""


def graph_key(cell: nn.Cell, arguments: Tuple[Any, ...]) -> str:
    """Returns the key of the graph that a cell has for some arguments: 64 hexadecimal digits.

    It holds all that a graph may depend on: of the cell and all that it reaches, the classes with their functions, the
    attributes and the constants, and names, shapes and dtypes of parameters, whose values are in no graph; shapes and
    dtypes of the arguments; MindSpore's settings, the variables of the environment that it reads, and what is
    installed, mindlora and MindFormers by their files.

    Args:
        cell (nn.Cell): The cell that is to be compiled.
        arguments (tuple): What its ``construct`` is called with; of keywords a pair each, name and value.

    Raises:
        NoKeyError: The cell holds something whose content cannot be seen, such as a lock.
    """
    digest = hashlib.sha256()
    walk = _Walk(digest.update)
    walk.add(_surroundings(), "the surroundings")
    walk.add(cell, type(cell).__name__)
    walk.add_arguments(arguments)
    return digest.hexdigest()


class _Walk:
    """Writes down what is reached from an object, each thing once; numbers stand for what was written before."""

    def __init__(self, write: Callable[[bytes], None]):
        self._write = write
        self._numbers: Dict[int, int] = {}
        # What has a number stays alive, so that no other object gets its id.
        self._numbered: List[Any] = []

    def add(self, value: Any, where: str) -> None:
        """Writes a value down."""
        if isinstance(value, _PLAIN):
            self._token(type(value).__name__, repr(value))
        elif isinstance(value, ms.common.dtype.typing.Type):
            self._token("dtype", str(value))
        elif id(value) in self._numbers:
            self._token("again", str(self._numbers[id(value)]))
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._numbered.append(value)
            self._add_new(value, where)

    def add_arguments(self, arguments: Any) -> None:
        """Writes down what a graph knows of its arguments: of tensors the shape and the dtype."""
        for argument in arguments:
            if isinstance(argument, ms.Tensor):
                self._token("argument", f"{type(argument).__name__} {argument.shape} {argument.dtype}")
            elif isinstance(argument, (list, tuple)):
                self._token(type(argument).__name__, str(len(argument)))
                self.add_arguments(argument)
            else:
                self.add(argument, "an argument")

    def _add_new(self, value: Any, where: str) -> None:
        if isinstance(value, ms.Parameter):
            flags = (value.requires_grad, value.layerwise_parallel, value.parallel_optimizer)
            self._token("parameter", f"{value.name} {value.shape} {value.dtype} {flags}")
        elif isinstance(value, ms.Tensor):
            self._token("tensor", f"{value.shape} {value.dtype}")
            # Those of Cell.set_inputs have dimensions of any size, -1 or -2, and no content.
            if min(value.shape, default=0) >= 0:
                array = value.astype(ms.float32) if value.dtype == ms.bfloat16 else value
                self._write(array.asnumpy().tobytes())
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._token("array", f"{value.shape} {value.dtype}")
            self._write(value.tobytes())
        elif isinstance(value, dict):
            self._items(type(value).__name__, value.items(), where)
        elif isinstance(value, (set, frozenset)):
            self._token(type(value).__name__, repr(sorted(map(repr, value))))
        elif isinstance(value, (list, tuple, np.ndarray)):
            self._items(type(value).__name__, enumerate(value), where)
        elif isinstance(value, Generator):
            # Its seed and offset are in parameters.
            self._token("generator", "")
        elif isinstance(value, enum.Enum) or hasattr(type(value), "__members__"):
            # Python's, or those of MindSpore's library.
            self._token("enum", f"{_name(type(value))} {value.name}")
        elif isinstance(value, (types.ModuleType, logging.Logger)):
            self._token(type(value).__name__, value.name if isinstance(value, logging.Logger) else value.__name__)
        elif isinstance(value, type):
            self._class(value, where)
        elif isinstance(value, _FUNCTIONS):
            self._function(value, where)
        else:
            self._object(value, where)

    def _items(self, kind: str, items: Any, where: str) -> None:
        items = list(items)
        self._token(kind, str(len(items)))
        for name, value in items:
            self.add(name, where)
            self.add(value, f"{where}.{name}")

    def _object(self, value: Any, where: str) -> None:
        kind = type(value)
        if not hasattr(value, "__dict__"):
            raise NoKeyError(f"{where} is a {_name(kind)}, whose content cannot be seen")
        self._token("object", _name(kind))
        self.add(kind, where)
        attributes = vars(value)
        if isinstance(value, nn.Cell):
            # What is lazy is None until somebody asks for it, and empty then.
            attributes = {
                name: item
                for name, item in attributes.items()
                if name not in _BOOKKEEPING and not (name.startswith("_lazy") and not item)
            }
        self._items("attributes", attributes.items(), where)

    def _class(self, value: type, where: str) -> None:
        """Writes down a class as it is now: some process may have given it another function."""
        self._token("class", _name(value))
        if _is_released(value):
            return
        for base in value.__bases__:
            self.add(base, where)
        for name, item in vars(value).items():
            if isinstance(item, (staticmethod, classmethod)):
                item = item.__func__
            if isinstance(item, (*_FUNCTIONS, *_PLAIN)) and not name.startswith("__"):
                self._token("member", name)
                self.add(item, f"{where}.{name}")

    def _function(self, value: Any, where: str) -> None:
        if isinstance(value, functools.partial):
            self._items("partial", enumerate((value.func, value.args, value.keywords)), where)
        elif isinstance(value, types.MethodType):
            self._items("method", enumerate((value.__func__, value.__self__)), where)
        elif not isinstance(value, types.FunctionType):
            self._token("function", _name(value))
        else:
            self._token("function", _name(value))
            self._code(value.__code__, where)
            self._items("defaults", enumerate(value.__defaults__ or ()), where)
            for cell in value.__closure__ or ():
                self.add(cell.cell_contents, f"{where}'s closure")

    def _code(self, code: types.CodeType, where: str) -> None:
        self._token("code", f"{code.co_code.hex()} {code.co_names} {code.co_varnames}")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, where)
            else:
                self.add(constant, where)

    def _token(self, kind: str, text: str) -> None:
        # With its length, so that no two sequences of tokens are the same bytes.
        self._write(f"{kind} {len(text)} {text}\n".encode())


_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType, functools.partial),
)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', repr(value))}"


def _is_released(value: Any) -> bool:
    module = getattr(value, "__module__", None) or "builtins"
    return module.partition(".")[0] in _KNOWN_BY_NAME


def _surroundings() -> Dict[str, Any]:
    """Returns what a graph may depend on beside the cell."""
    return {
        "versions": {name: importlib.metadata.version(name) for name in ("mindspore", "numpy")},
        "python": sys.version,
        "machine": platform.machine(),
        "files": [_files(), _other_modules()],
        "settings": {name: ms.get_context(name) for name in _SETTINGS},
        "parallel": [ms.get_auto_parallel_context(name) for name in ("parallel_mode", "device_num", "global_rank")],
        "environment": {name: value for name, value in sorted(os.environ.items()) if _is_read(name)},
    }


def _is_read(name: str) -> bool:
    return name.startswith("MS_") and not name.startswith("MS_COMPILER_CACHE")


@functools.lru_cache(maxsize=None)
def _files() -> str:
    """Returns a digest of the sources of mindlora, and of names, sizes and times of those of MindFormers."""
    digest = hashlib.sha256()
    ours = pathlib.Path(__file__).parents[1]
    (mindformers,) = importlib.util.find_spec("mindformers").submodule_search_locations
    for path in sorted(ours.rglob("*.py")):
        digest.update(f"{path.relative_to(ours)}\n".encode() + path.read_bytes())
    for path in sorted(pathlib.Path(mindformers).rglob("*.py")):
        state = path.stat()
        digest.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _other_modules() -> List[Tuple[str, str]]:
    """Returns name and digest of each loaded module that is not installed: a user's own cells, and what they use."""
    files = {name: getattr(module, "__file__", None) for name, module in sorted(sys.modules.items())}
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*places, str(pathlib.Path(__file__).parents[1])]
    installed = tuple(os.path.join(folder, "") for folder in folders)
    return [
        (name, hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest())
        for name, file in files.items()
        if file and file.endswith(".py") and not file.startswith(installed) and os.path.exists(file)
    ]
