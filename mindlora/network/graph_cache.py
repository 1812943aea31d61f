"""Compiled graphs on disk: the second start of a command takes them from there instead of compiling them again.

MindSpore's own compile cache numbers the graphs of a process and reads the next number, whatever graph
was written under it. Here each graph has a key computed from its content, the same in any process, and MindSpore is
shown one graph at a time, under the number that it is about to read.
"""

import atexit
import contextlib
import ctypes
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import pathlib
import platform
import shutil
import sys
import sysconfig
import tempfile
import types
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.common.generator import Generator
from mindspore.nn.cell import _cell_graph_executor

from mindlora.core.atomic import replace_file

logger = logging.getLogger("mindlora")
VARIABLE = "MINDLORA_GRAPH_CACHE"
# Settings that MindSpore reads whenever it compiles.
_SWITCH, _PLACE = "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH"
_HASH = "compile_dependency.hash"
# Limit in bytes of the user's own folder, beyond which the least recently used graphs are deleted.
HOME_BYTES = 256 * 2**20
# MindSpore's log levels, one per part of its libraries, and the part that reads graphs.
_LOG_LEVELS, _CORE, _NOTHING = "_ZN9mindspore25g_ms_submodule_log_levelsE", 1, 5
# Attributes that MindSpore sets in every cell: numbers of this process, and results of compiling.
_BOOKKEEPING = {
    *("_create_time", "_id", "_compile_cache", "_phase_cache", "_compile_phase", "compile_phase"),
    *("_compiled", "current_phase", "arguments_key", "_exist_objs", "_exist_names", "_init_flag"),
    *("_has_mutable_args_list", "sequence_modified", "_lazy_construct_sig", "__parse_method__", "is_top_cell"),
    "_is_check_and_refresh",
    # The name of the cell in messages, and the children and parameters again.
    *("_scope", "_params_list", "_primitives"),
}
# A class lists here attributes that no graph reads, beside those of its bases: keys do not depend on them.
UNREAD = "UNREAD_BY_GRAPHS"
# MindFormers notes in a model's configuration which data a run trains on, and the settings of its adapters. What these
# make of the model is in the key cell by cell; seeds, rates, names and paths are in no graph.
_CONFIGURATIONS, _NOTED = ("PretrainedConfig", "TransformerConfig"), ("dataset_config", "pet_config")
_SETTINGS = ("mode", "device_target", "jit_level", "jit_config", "jit_syntax_level", "deterministic", "max_call_depth")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice, np.generic, np.dtype)
# Packages whose functions a version, or a digest of files in the key, identifies.
_KNOWN_BY_NAME = ("mindspore", "numpy", "builtins", *getattr(sys, "stdlib_module_names", ()))


class CompiledOnce(nn.Cell):
    """A cell whose compiled graphs are kept in the folder MINDLORA_GRAPH_CACHE."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the cell, or takes its graph from the cache; MindSpore calls this before every step."""
        cache = graph_cache()
        if cache is None:
            super().compile(*args, **kwargs)
        else:
            cache.compile(self, (*args, *kwargs.items()), functools.partial(super().compile, *args, **kwargs))


@contextlib.contextmanager
def in_graph_mode() -> Iterator[None]:
    """Lets cells be graphs, in a process that computes in PyNative mode otherwise.

    The mode is that of all threads: none of the others may compute meanwhile.
    """
    mode = ms.get_context("mode")
    if mode != ms.GRAPH_MODE:
        ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        if mode != ms.GRAPH_MODE:
            ms.set_context(mode=mode)


class CompiledInAnyMode(CompiledOnce):
    """CompiledOnce that is a graph in PyNative mode too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with in_graph_mode():
            return super().__call__(*args, **kwargs)


def home_folder() -> pathlib.Path:
    """Returns the folder of graphs in the user's cache folder, by XDG_CACHE_HOME or ~/.cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(caches) / "mindlora" / "graphs"


def keep_in_home(say: Callable[[str], None], way_out: str) -> None:
    """Keeps compiled graphs in the user's cache folder, unless MINDLORA_GRAPH_CACHE is set or this device keeps none.

    ``say`` gets a line if the folder is new, with ``way_out``, which keeps none, or if the folder cannot be made.
    """
    if VARIABLE in os.environ or not _can_keep():
        return
    folder = home_folder()
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(f"compiled graphs are not kept for later starts: {error}. Set XDG_CACHE_HOME to a folder to write to.")
        return
    os.environ[VARIABLE] = str(folder)
    if is_new:
        say(f"compiled graphs are kept in {folder} for later starts ({way_out} keeps none)")


def graph_cache() -> Optional["GraphCache"]:
    """Returns this process's cache of graphs; None where the variable MINDLORA_GRAPH_CACHE names no folder."""
    folder = os.environ.get(VARIABLE)
    return _cache_in(folder, os.getpid()) if folder and _can_keep() else None


def _can_keep() -> bool:
    """Returns whether graphs can be kept: only on a CPU, and of single processes, as others hold their groups."""
    return ms.get_context("device_target") == "CPU" and ms.get_auto_parallel_context("device_num") <= 1


@functools.lru_cache(maxsize=None)
def _cache_in(folder: str, process: int) -> Optional["GraphCache"]:
    """Returns the cache of a process; a forked process has its own."""
    if os.environ.get(_SWITCH) == "1":
        logger.warning("%s has no effect while %s is 1. Unset one of them.", VARIABLE, _SWITCH)
        return None
    if not hasattr(_cell_graph_executor, "_set_compile_cache_dep_files"):
        logger.warning("%s has no effect with MindSpore %s. Unset it.", VARIABLE, ms.__version__)
        return None
    try:
        at_home = pathlib.Path(folder) == home_folder()
        return GraphCache(pathlib.Path(folder), HOME_BYTES if at_home else None)
    except OSError as error:
        logger.warning("%s has no effect: %s. Name a folder that can be written to.", VARIABLE, error)
        return None


class GraphCache:
    """A folder of compiled graphs, used by one process.

    Args:
        folder (Path): The folder, created if it is missing; processes can share it. Each graph is a file in it, named
            by its key. Any file may be deleted at any time.
        limit (int): Bytes of its files, beyond which the least recently used are deleted. Default: None, all
            are kept.
    """

    def __init__(self, folder: pathlib.Path, limit: Optional[int] = None):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._limit = limit
        self._log_levels = _log_levels()
        self._own = pathlib.Path(tempfile.mkdtemp(prefix="mindlora-graphs-"))
        atexit.register(shutil.rmtree, self._own, ignore_errors=True)
        self._place = self._own / "rank_0" / "graph_cache"
        self._place.mkdir(parents=True)
        self._depends_on = self._own / "nothing.py"
        content = b"# Graphs depend on no file: their keys say what they depend on.\n"
        self._depends_on.write_bytes(content)
        # MindSpore reads graphs if it finds the hash of the files that they depend on. After a missing one it
        # reads no more. So it is always shown a file, but in an empty folder, where its errors would help nobody.
        self._reads = any(folder.glob("*.mindir"))
        if self._reads:
            of_files = hashlib.sha256(content).hexdigest()
            (self._place / _HASH).write_text(hashlib.sha256(of_files.encode()).hexdigest())
        self._number = 0
        self._asked: Optional[Tuple[nn.Cell, Tuple[Any, ...]]] = None
        # The path of the graph that is being compiled, and the time of the file that MindSpore is shown.
        self._kept: Optional[pathlib.Path] = None
        self._shown_at: Optional[int] = None
        # MindSpore calls it right before it compiles a graph.
        _cell_graph_executor._set_compile_cache_dep_files = self._before_compiling

    def compile(self, cell: nn.Cell, arguments: Tuple[Any, ...], compile_cell: Callable[[], None]) -> None:
        """Calls ``compile_cell``, which compiles a cell for some arguments or reuses its graph, with the cache."""
        self._asked = cell, arguments
        try:
            with self._levels_kept():
                compile_cell()
            if self._kept:
                self._after_compiling(self._kept)
        finally:
            if self._kept:
                self._file().unlink(missing_ok=True)
                self._number += 1
                os.environ.pop(_SWITCH, None)
            self._asked = self._kept = self._shown_at = None

    def _before_compiling(self, phase: str) -> None:
        """Shows MindSpore the cached graph, if there is one, and otherwise lets it write the graph."""
        if self._asked is None:
            return
        try:
            key = graph_key(*self._asked)
        except NoKeyError as error:
            cell = type(self._asked[0]).__name__
            logger.warning("The graph of %s is not kept, as %s. Keep that out of the cell.", cell, error)
            return
        kept = self._folder / f"{key}.mindir"
        if self._reads:
            self._show(kept)
        elif kept.exists():
            return
        self._kept = kept
        os.environ[_SWITCH], os.environ[_PLACE] = "1", str(self._own)
        _cell_graph_executor._graph_executor.set_compile_cache_dep_files([str(self._depends_on)])

    def _show(self, kept: pathlib.Path) -> None:
        """Writes the file that MindSpore reads: a copy, since MindSpore overwrites a file that it cannot read."""
        try:
            shutil.copyfile(kept, self._file())
        except FileNotFoundError:
            self._file().touch()
            logger.info("%s lacks this graph, which is compiled.", self._folder)
            if self._log_levels is not None:
                # MindSpore would log errors about the empty file.
                self._log_levels[_CORE] = _NOTHING
        with contextlib.suppress(OSError):
            # Marks the time of use, unless the file is missing or another user's.
            os.utime(kept)
        self._shown_at = self._file().stat().st_mtime_ns

    @contextlib.contextmanager
    def _levels_kept(self):
        """Restores MindSpore's log levels on leaving."""
        before = None if self._log_levels is None else self._log_levels[_CORE]
        try:
            yield
        finally:
            if self._log_levels is not None:
                self._log_levels[_CORE] = before

    def _after_compiling(self, kept: pathlib.Path) -> None:
        """Keeps the compiled graph, unless MindSpore was shown it."""
        file = self._file()
        if file.exists() and file.stat().st_mtime_ns != self._shown_at:
            try:
                with replace_file(str(kept)) as unfinished:
                    shutil.copyfile(file, unfinished)
            except OSError as error:
                logger.warning("A compiled graph is not kept: %s. Make room in %s.", error, self._folder)
            self._delete_beyond_limit()
        elif self._shown_at:
            logger.info("A compiled graph was taken from %s.", kept)

    def _delete_beyond_limit(self) -> None:
        if self._limit is None:
            return
        room = self._limit
        with contextlib.suppress(OSError):
            states = [(path, path.stat()) for path in self._folder.glob("*.mindir")]
            for path, state in sorted(states, key=lambda entry: entry[1].st_mtime_ns, reverse=True):
                room -= state.st_size
                if room < 0:
                    path.unlink(missing_ok=True)

    def _file(self) -> pathlib.Path:
        return self._place / f"compile_cache_{self._number}.mindir"


def _log_levels() -> Any:
    """Returns MindSpore's array of log levels; None if its library has none of that name."""
    library = os.path.join(os.path.dirname(ms.__file__), "lib", "libmindspore_core.so")
    with contextlib.suppress(OSError, ValueError):
        return (ctypes.c_int * (_CORE + 1)).in_dll(ctypes.CDLL(library), _LOG_LEVELS)
    return None


class NoKeyError(Exception):
    """A cell holds an object that a key cannot represent; the message names it and its place."""


def graph_key(cell: nn.Cell, arguments: Tuple[Any, ...]) -> str:
    """Returns the key of a cell's graph for some arguments: 64 hexadecimal digits.

    It covers everything that a graph may depend on: for the cell and all objects that it reaches, classes with their
    functions, attributes and constants, and names, shapes and dtypes of parameters, whose values are in no graph;
    shapes and dtypes of the arguments, or of what set_inputs says of them; MindSpore's settings and environment
    variables, and the installed packages, mindlora and MindFormers by their files.

    Args:
        cell (nn.Cell): The cell that is to be compiled.
        arguments (tuple): The arguments of its ``construct``; keywords as pairs (name, value).

    Raises:
        NoKeyError: The cell holds an object whose content is hidden, such as a lock.
    """
    digest = hashlib.sha256()
    walk = _Walk(digest.update)
    walk.add(_surroundings(), "the surroundings")
    walk.add(cell, type(cell).__name__)
    # Sizes that set_inputs leaves open are those of no argument.
    inputs = itertools.zip_longest(arguments, cell.get_inputs() or ())
    walk.add_arguments(given if seen is None else seen for given, seen in inputs)
    return digest.hexdigest()


class _Walk:
    """Writes down everything reachable from an object, once; numbers stand for objects written before."""

    def __init__(self, write: Callable[[bytes], None]):
        self._write = write
        self._numbers: Dict[int, int] = {}
        # Numbered objects stay alive, so that no other object gets their id.
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
        """Writes down a graph's view of its arguments: the shape and dtype of tensors."""
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
            # Tensors of Cell.set_inputs have dimensions of any size, -1 or -2, and no content.
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
        unread = {name for base in kind.__mro__ for name in vars(base).get(UNREAD, ())}
        if any(base.__name__ in _CONFIGURATIONS for base in kind.__mro__):
            unread.update(_NOTED)
        attributes = {name: item for name, item in vars(value).items() if name not in unread}
        if isinstance(value, nn.Cell):
            # Lazy attributes are None until they are read, and empty then.
            attributes = {
                name: item
                for name, item in attributes.items()
                if name not in _BOOKKEEPING and not (name.startswith("_lazy") and not item)
            }
        self._items("attributes", attributes.items(), where)

    def _class(self, value: type, where: str) -> None:
        """Writes down the current state of a class: a process may have replaced a function in it."""
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
    """Returns the settings and versions on which a graph may depend besides the cell."""
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
    """Returns name and digest of each loaded module that is not installed: a user's own cells and their imports."""
    files = {name: getattr(module, "__file__", None) for name, module in sorted(sys.modules.items())}
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*places, str(pathlib.Path(__file__).parents[1])]
    installed = tuple(os.path.join(folder, "") for folder in folders)
    return [
        (name, hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest())
        for name, file in files.items()
        if file and file.endswith(".py") and not file.startswith(installed) and os.path.exists(file)
    ]
