"""Compiled graphs on disk: the second start of a command takes them from there instead of compiling them again.

MindSpore's own compile cache numbers the graphs of a process and reads the number that comes next, whatever that graph
was when it was written. Here each graph has a key of its content (see graph_key), and MindSpore is shown one graph at a
time, under the number that it is about to ask for.
"""

import atexit
import functools
import logging
import os
import pathlib
import shutil
import tempfile
from typing import Any, Callable, Optional, Tuple

import mindspore as ms
from mindspore import nn
from mindspore.nn.cell import _cell_graph_executor

from mindlora.core.atomic import replace_file
from mindlora.network.graph_key import NoKeyError, graph_key

logger = logging.getLogger("mindlora")
VARIABLE = "MINDLORA_GRAPH_CACHE"
# MindSpore reads these whenever it compiles.
_SWITCH, _PLACE = "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH"
_HASH = "compile_dependency.hash"


class CompiledOnce(nn.Cell):
    """A cell whose compiled graphs are kept where MINDLORA_GRAPH_CACHE says."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the cell, or takes its graph from the cache; MindSpore calls this before every step."""
        cache = graph_cache()
        if cache is None:
            super().compile(*args, **kwargs)
        else:
            cache.compile(self, (*args, *kwargs.items()), functools.partial(super().compile, *args, **kwargs))


def graph_cache() -> Optional["GraphCache"]:
    """Returns this process's cache of graphs; None where the variable MINDLORA_GRAPH_CACHE names no folder.

    Only graphs of one process on a CPU are kept: graphs of several hold the groups in which these communicate.
    """
    folder = os.environ.get(VARIABLE)
    if not folder or ms.get_context("device_target") != "CPU" or ms.get_auto_parallel_context("device_num") > 1:
        return None
    return _cache_in(folder, os.getpid())


@functools.lru_cache(maxsize=None)
def _cache_in(folder: str, process: int) -> Optional["GraphCache"]:
    """Returns the cache of a process; a process that was forked has its own."""
    if os.environ.get(_SWITCH) == "1":
        logger.warning("%s has no effect while %s is 1. Unset one of them.", VARIABLE, _SWITCH)
        return None
    if not hasattr(_cell_graph_executor, "_set_compile_cache_dep_files"):
        logger.warning("%s has no effect with MindSpore %s. Unset it.", VARIABLE, ms.__version__)
        return None
    try:
        return GraphCache(pathlib.Path(folder))
    except OSError as error:
        logger.warning("%s has no effect: %s. Name a folder that can be written to.", VARIABLE, error)
        return None


class GraphCache:
    """A folder of compiled graphs, used by one process.

    Args:
        folder (Path): The folder, made where it is missing; processes can share it. Each graph is a file in it, called
            by its key. Any of them may be deleted at any time.
    """

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._own = pathlib.Path(tempfile.mkdtemp(prefix="mindlora-graphs-"))
        atexit.register(shutil.rmtree, self._own, ignore_errors=True)
        self._place = self._own / "rank_0" / "graph_cache"
        self._place.mkdir(parents=True)
        # MindSpore reads no graph where this one is missing: a hash of the files that the graphs are said to depend on.
        self._hash = folder / f"mindspore-{ms.__version__}.hash"
        self._reads = _copy(self._hash, self._place / _HASH)
        self._depends_on = self._own / "nothing.py"
        self._depends_on.write_text("# Graphs depend on no file: their keys say what they depend on.\n")
        self._number = 0
        self._asked: Optional[Tuple[nn.Cell, Tuple[Any, ...]]] = None
        # Where the graph that is being compiled is kept, and when the file that MindSpore is shown was written.
        self._kept: Optional[pathlib.Path] = None
        self._shown_at: Optional[int] = None
        # MindSpore calls it when a graph is about to be compiled indeed.
        _cell_graph_executor._set_compile_cache_dep_files = self._before_compiling

    def compile(self, cell: nn.Cell, arguments: Tuple[Any, ...], compile_cell: Callable[[], None]) -> None:
        """Calls ``compile_cell``, which compiles a cell for some arguments or finds that it was, by the cache."""
        self._asked = cell, arguments
        try:
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
        """Shows MindSpore the graph that it is to compile, if there is one, and lets it write the graph if not."""
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
            # A copy: MindSpore writes over a file that it cannot read. After one that is not there, it reads no more.
            self._reads = _copy(kept, self._file())
        elif kept.exists() and self._hash.exists():
            return
        if self._reads:
            self._shown_at = self._file().stat().st_mtime_ns
        self._kept = kept
        os.environ[_SWITCH], os.environ[_PLACE] = "1", str(self._own)
        _cell_graph_executor._graph_executor.set_compile_cache_dep_files([str(self._depends_on)])

    def _after_compiling(self, kept: pathlib.Path) -> None:
        """Keeps the graph that was compiled, unless it is the one that MindSpore was shown."""
        file = self._file()
        if file.exists() and file.stat().st_mtime_ns != self._shown_at:
            try:
                for source, target in ((file, kept), (self._place / _HASH, self._hash)):
                    with replace_file(str(target)) as unfinished:
                        shutil.copyfile(source, unfinished)
            except OSError as error:
                logger.warning("A compiled graph is not kept: %s. Make room in %s.", error, self._folder)
        elif self._shown_at:
            logger.info("A compiled graph was taken from %s.", kept)

    def _file(self) -> pathlib.Path:
        return self._place / f"compile_cache_{self._number}.mindir"


def _copy(source: pathlib.Path, target: pathlib.Path) -> bool:
    """Copies a file; returns whether it was there."""
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        return False
    return True
