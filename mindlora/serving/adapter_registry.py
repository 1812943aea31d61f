"""AdapterRegistry: the names and paths of the adapters on disk; it reads nothing except one folder's entries."""

import bisect
import contextlib
import difflib
import os
import threading
import time
from typing import Callable, Dict, List, Mapping, Optional, Set, Tuple

from mindlora.core.errors import AdapterNotFoundError, ConfigError, RequestError
from mindlora.core.text import shown

# Seconds between two checks of the folder's mtime.
_PATIENCE = 1.0
# Number of candidates on either side of a name that was not found.
_NEIGHBOURS = 16


class AdapterRegistry:
    """Names and paths of adapters: the subfolders of a folder, and adapters that are named one by one.

    A name is only looked up, never turned into a path. The folder is listed again when its mtime has changed, at
    most once a second, by ``refresh``; nothing in a subfolder is read. Subfolders whose names begin with a dot
    (half-written adapters) or cannot be printed are left out. A name given one by one takes precedence over a
    subfolder. Any thread may call any method.

    Raises:
        ConfigError: ``folder`` is not a folder or is itself an adapter, one of ``paths`` does not exist, or a name
            is empty or holds control characters.
    """

    def __init__(
        self,
        folder: Optional[str] = None,
        paths: Optional[Mapping[str, str]] = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder = None if folder is None else os.path.abspath(folder)
        self._clock = clock
        self._lock = threading.Lock()
        self._named = {_checked_name(name): _existing(name, path) for name, path in (paths or {}).items()}
        self._listed: Dict[str, str] = {}
        self._hidden: Set[str] = set()
        self._paths: Dict[str, str] = dict(self._named)
        self._sorted: Optional[Tuple[List[str], List[str]]] = None
        self._mtime = -1
        self._looked = clock()
        if self.folder is not None:
            if not os.path.isdir(self.folder):
                raise ConfigError(f"{self.folder} is not a folder: name one whose subfolders are adapters.")
            if os.path.exists(os.path.join(self.folder, "adapter_config.json")):
                raise ConfigError(
                    f"{self.folder} is an adapter, not a folder of adapters: name the folder that it is in."
                )
            try:
                self._list(self.folder)
            except OSError as error:
                raise ConfigError(
                    f"The adapters in {self.folder} cannot be listed: {error}. Correct the folder's permissions."
                ) from error

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def check_base_name(self, name: str) -> None:
        """Raises ConfigError if an adapter has the base's name ``name``, so that requests could not choose it."""
        if name in self:
            raise ConfigError(
                f"There is an adapter {shown(name)}, and the base has this name too: call the adapter something else "
                "(--adapter NAME=PATH, or rename its folder in --adapters), or the base (--model-name)."
            )

    def names(self) -> List[str]:
        """Returns all names in order."""
        self.refresh()
        with self._lock:
            return list(self._in_order()[0])

    def path(self, name: str) -> str:
        """Returns an adapter's path, in constant time; raises AdapterNotFoundError if there is none of that name."""
        path = self._paths.get(name)
        if path is None:
            advice = self._hint(name)
            raise AdapterNotFoundError(f"There is no adapter {shown(name)}.{advice}")
        return path

    def without_paths(self, message: str) -> str:
        """Returns a message for clients, with adapters' names in place of their paths."""
        with self._lock:
            paths = dict(self._paths)
        for name in sorted(paths, key=lambda name: -len(paths[name])):
            message = message.replace(paths[name], name)
        for folder in (self.folder, os.path.realpath(self.folder)) if self.folder else ():
            message = message.replace(os.path.join(folder, ""), "")
        return message

    def refresh(self) -> None:
        """Lists the folder again if its mtime has changed, but looks at most once a second."""
        now = self._clock()
        with self._lock:
            if self.folder is None or now - self._looked < _PATIENCE:
                return
            self._looked = now
            # While the folder cannot be read, the last list stays.
            with contextlib.suppress(OSError):
                self._list(self.folder)

    def register(self, name: str, path: str, restricted: bool = True, replace: bool = False) -> Optional[str]:
        """Adds an adapter while the server runs, and returns the previous path of the name.

        Args:
            path (str): A folder or file; relative to the registry's folder if there is one.
            restricted (bool): Whether the path must be in the registry's folder, links followed.
            replace (bool): Whether an adapter of this name may be replaced.

        Raises RequestError if the name is taken, empty or holds control characters, or the path is not allowed or holds
        nothing.
        """
        try:
            _checked_name(name)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        real = self._allowed(path) if restricted else os.path.abspath(path)
        with self._lock:
            before = self._paths.get(name)
            if before is not None and not replace:
                raise RequestError(f"There is an adapter {shown(name)} already: unload it first, or use another name.")
            self._named[name] = real
            self._merge()
        return before

    def publish(self, name: str) -> None:
        """Adds the name of an adapter that is only in memory (AdapterMemory.publish); the name serves as its path."""
        with self._lock:
            self._named[_checked_name(name)] = name
            self._merge()

    def unregister(self, name: str) -> None:
        """Removes a name; a subfolder of that name stays hidden until the name is registered again.

        Raises AdapterNotFoundError if there is none of that name.
        """
        self.path(name)
        with self._lock:
            self._named.pop(name, None)
            if name in self._listed:
                self._hidden.add(name)
            self._merge()

    def _allowed(self, path: str) -> str:
        """Returns the real path of an adapter that may be registered."""
        if self.folder is None:
            raise RequestError(
                "Adapters can be loaded at run time from the folder of --adapters, but there is none. Start the server "
                "with --adapters DIR."
            )
        root = os.path.realpath(self.folder)
        real = root if "\0" in path else os.path.realpath(os.path.join(root, path))
        # The same answer for paths outside the folder and missing ones reveals nothing about the disk.
        if real == root or os.path.commonpath((root, real)) != root or not os.path.exists(real):
            raise RequestError(
                f"There is no adapter at {shown(path)} in the server's folder of adapters. Give a path in it."
            )
        return real

    def _list(self, folder: str) -> None:
        mtime = os.stat(folder).st_mtime_ns
        if mtime == self._mtime:
            return
        with os.scandir(folder) as entries:
            shown_ones = (one for one in entries if one.name.isprintable() and not one.name.startswith("."))
            self._listed = {entry.name: entry.path for entry in shown_ones if entry.is_dir()}
        # A change within the resolution of the file system's clock may be missed, so the folder is listed once more.
        self._mtime = mtime if time.time_ns() - mtime > _PATIENCE * 1e9 else -1
        self._hidden.intersection_update(self._listed)
        self._merge()

    def _merge(self):
        listed = {name: path for name, path in self._listed.items() if name not in self._hidden}
        self._paths = {**listed, **self._named}
        self._sorted = None

    def _in_order(self):
        """Returns the sorted names, and the sorted reversed names."""
        if self._sorted is None:
            self._sorted = sorted(self._paths), sorted(name[::-1] for name in self._paths)
        return self._sorted

    def _hint(self, name: str) -> str:
        """Returns a sentence with the most similar names that share the beginning or the end of ``name``."""
        with self._lock:
            forwards, backwards = self._in_order()
        if not forwards:
            return " None is registered: ask the base."
        near = _around(forwards, name) + [backward[::-1] for backward in _around(backwards, name[::-1])]
        close = difflib.get_close_matches(name[:200], list(dict.fromkeys(near)), n=3)
        meant = f" Did you mean {' or '.join(map(shown, close))}?" if close else ""
        return f"{meant} Choose from the {len(forwards)} that /v1/models lists."


def _around(ordered: List[str], name: str) -> List[str]:
    place = bisect.bisect_left(ordered, name)
    return ordered[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]


def _checked_name(name: str) -> str:
    if not name or not name.isprintable() or len(name) > 255:
        raise ConfigError(f"{shown(name)} cannot be the name of an adapter: it must be 1 to 255 printable characters.")
    return name


def _existing(name: str, path: str) -> str:
    if not os.path.exists(path):
        raise ConfigError(f"The adapter {shown(name)} is said to be at {path}, where there is nothing. Check the path.")
    return os.path.abspath(path)
