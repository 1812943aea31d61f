"""The host-memory tier of the adapter cache: AdapterMemory, its counts, and the detection of changed files."""

import collections
import contextlib
import dataclasses
import enum
import itertools
import logging
import os
import threading
import time
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from mindlora.core.errors import AdapterError, AdapterFormatError, LoraError
from mindlora.core.text import shown
from mindlora.serving.adapter_registry import AdapterRegistry

logger = logging.getLogger("mindlora")

# How often files are read if a request meanwhile sees newer ones.
_ATTEMPTS = 3
# Seconds before each try to read files that change while they are read.
_PAUSES = (0.0, 0.005, 0.02)
# Files that adapters.files.read may open; changes of other files do not change the adapter.
_ENDINGS = (".json", ".safetensors", ".ckpt", ".bin")
_BESIDE = ("adapter_config.json", "mindformers_adapter_config.json")

# The path, and for each file its name, mtime in ns, size in bytes and inode.
Stamp = Tuple[str, Tuple[Tuple[str, int, int, int], ...]]


def stamp_of(path: str) -> Optional[Stamp]:
    """Returns a stamp that changes when files of the adapter at ``path`` are replaced or written, or None."""
    try:
        return path, tuple(sorted(_folder(path) if os.path.isdir(path) else _file(path)))
    except OSError:
        return None


def _folder(path):
    with os.scandir(path) as entries:
        return [_described(entry.name, entry.stat()) for entry in entries if entry.name.endswith(_ENDINGS)]


def _file(path):
    files = [_described("", os.stat(path))]
    for name in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            files.append(_described(name, os.stat(os.path.join(os.path.dirname(path), name))))
    return files


def _described(name, status):
    return name, status.st_mtime_ns, status.st_size, status.st_ino


@dataclasses.dataclass
class Counts:
    """Counts of one tier since the server started.

    Attributes:
        hits, misses (int): How often the tier had the adapter, and how often it had to be loaded.
        loads (int): Adapters loaded: read from disk, or copied into a slot.
        evictions (int): Adapters removed to make room for others.
        seconds (float): Time spent on loads and failures.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    failures: int = 0
    seconds: float = 0.0


class Tally:
    """Counts in total and by registered adapter. Its owner must ensure that one thread uses it at a time."""

    def __init__(self, registry: AdapterRegistry):
        self._registry = registry
        self._all = Counts()
        self._adapters: Dict[str, Counts] = {}

    def add(self, name: str, field: str, amount: float = 1) -> None:
        """Adds ``amount`` to a field of Counts, in total and for the adapter ``name``."""
        if name not in self._adapters:
            if len(self._adapters) > 2 * len(self._registry) + 64:
                self._adapters = {old: counts for old, counts in self._adapters.items() if old in self._registry}
            self._adapters[name] = Counts()
        for counts in (self._all, self._adapters[name]):
            setattr(counts, field, getattr(counts, field) + amount)

    def copy(self) -> Tuple[Counts, Dict[str, Counts]]:
        """Returns a copy of the counts in total and by adapter."""
        adapters = {name: dataclasses.replace(counts) for name, counts in self._adapters.items()}
        return dataclasses.replace(self._all), adapters


class Loaded(NamedTuple):
    """The result of ``prepare`` for an adapter, and a version that is new each time files are read."""

    version: int
    packed: Any


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """The state of the tier: adapters in memory, their bytes and the limit, and counts by adapter."""

    resident: int
    nbytes: int
    max_bytes: int
    counts: Counts
    adapters: Dict[str, Counts]


class Load(enum.Enum):
    """The state of reading an adapter's files."""

    IDLE = "not asked for"
    ANNOUNCED = "a request has come"
    URGENT = "a slot or a caller waits for it"
    READING = "a thread reads"


# The states that may follow each state. ANNOUNCED becomes IDLE if the read is postponed until it is urgent; IDLE
# follows any state if the adapter is forgotten.
TRANSITIONS = {
    Load.IDLE: (Load.ANNOUNCED, Load.URGENT),
    Load.ANNOUNCED: (Load.URGENT, Load.READING, Load.IDLE),
    Load.URGENT: (Load.READING, Load.IDLE),
    Load.READING: (Load.IDLE,),
}


@dataclasses.dataclass(eq=False)
class _Entry:
    """The record of one adapter.

    Attributes:
        stamp (Stamp or None): Stamp of the files that were read.
        version (int): 0 while the current files have not been read.
        packed (Any): The result of ``prepare``; None if it is not in memory.
        fresh (bool): In memory and not yet returned by take().
        seen (Stamp or None): Stamp that a request saw on the disk meanwhile; None without such a request.
        published (bool): It comes from memory (publish): no file is read for it, and it is never evicted.
    """

    stamp: Optional[Stamp] = None
    version: int = 0
    packed: Any = None
    error: Optional[LoraError] = None
    fresh: bool = False
    load: Load = Load.IDLE
    seen: Optional[Stamp] = None
    published: bool = False

    def forget(self) -> None:
        """Forgets the files, not the read."""
        self.stamp = self.packed = self.error = None
        self.version = 0
        self.fresh = False


class AdapterMemory:
    """Adapters in host memory: the least recently used are evicted, and one read serves all waiting requests.

    A request's arrival (``prefetch``) looks at the files: if they are new or have changed, a thread reads them. A
    failure is kept with its message until the files change. ``take`` and ``version`` only look at the records, never
    at the disk, and never wait. Any thread may call any method.

    Args:
        prepare (callable): Takes a path; returns an object with ``nbytes``, or raises LoraError. Runs in the thread.
        max_bytes (int): Limit for the results of ``prepare``; adapters being read come on top.
        threads (int): Number of adapters read at once.
        on_ready (callable or None): Called in the thread with the name of an adapter that was read or has failed.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        prepare: Callable[[str], Any],
        max_bytes: int,
        threads: int = 1,
        on_ready: Optional[Callable[[str], None]] = None,
    ):
        self.registry = registry
        self.on_ready = on_ready
        self._prepare = prepare
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._versions = itertools.count(1)
        self._tally = Tally(registry)
        self._entries: Dict[str, _Entry] = {}
        # Names of adapters in memory, the least recently used first.
        self._recent: "collections.OrderedDict[str, None]" = collections.OrderedDict()
        # Names to be read, in the queues' order of priority.
        self._queues: Dict[Load, Deque[str]] = {load: collections.deque() for load in (Load.URGENT, Load.ANNOUNCED)}
        self._changed = threading.Condition()
        self._closed = False
        self._threads: List[threading.Thread] = [
            threading.Thread(target=self._run, name=f"adapters-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def publish(self, name: str, packed: Any) -> None:
        """Makes ``packed`` the adapter of that name from the next request on, with a new version.

        Its name must be registered by AdapterRegistry.publish. Results computed with the earlier values, such as the
        keys and values of a prompt, are then not used with the new ones.
        """
        with self._changed:
            entry = self._entry(name)
            entry.published = True
            entry.packed = packed
            entry.version = next(self._versions)

    def prefetch(self, name: str, held: Optional[int] = None) -> None:
        """Requests the adapter's files unless their current state is known, or a slot has that version (``held``).

        It is called when a request arrives. Raises AdapterNotFoundError if the adapter is not registered.
        """
        self.registry.refresh()
        path = self.registry.path(name)
        with self._changed:
            entry = self._entry(name)
            if entry.published:
                return
        stamp = stamp_of(path)
        with self._changed:
            entry = self._entry(name)
            if entry.load is not Load.IDLE:
                entry.seen = stamp
                return
            # Files that are missing for a moment, as while a folder is replaced, leave the record unchanged.
            if stamp != entry.stamp and not (stamp is None and entry.version):
                self._drop(name, entry)
                entry.forget()
            if entry.error or held and held == entry.version:
                return
            if entry.packed is None:
                self._queue(name, entry, Load.ANNOUNCED)
            else:
                self._tally.add(name, "hits")
                self._recent.move_to_end(name)

    def version(self, name: str) -> Optional[int]:
        """Returns the version of the adapter's newest known files, or None until they have been read.

        Raises LoraError if they cannot be used.
        """
        with self._changed:
            entry = self._entries.get(name)
            _raise(entry)
            return entry.version or None if entry else None

    def take(self, name: str) -> Optional[Loaded]:
        """Returns the adapter for a waiting slot; if it is not in memory, requests its reading and returns None.

        Raises LoraError if its files cannot be used.
        """
        with self._changed:
            entry = self._entry(name)
            _raise(entry)
            if entry.packed is not None:
                entry.fresh = False
                if not entry.published:
                    self._recent.move_to_end(name)
                return Loaded(entry.version, entry.packed)
            self._hurry(name, entry)
            return None

    def load(self, name: str) -> None:
        """Reads the adapter if needed, and waits until it is read; raises LoraError if it cannot be used."""
        self.prefetch(name)
        with self._changed:
            entry = self._entry(name)
            if entry.load is not Load.IDLE:
                self._hurry(name, entry)
            self._changed.wait_for(lambda: entry.load is Load.IDLE or self._closed)
            _raise(entry)
        self.registry.path(name)

    def forget(self, name: str) -> None:
        """Drops the record of the adapter."""
        with self._changed:
            self._remove(name)

    def stats(self) -> MemoryStats:
        """Returns the state of the tier."""
        with self._changed:
            return MemoryStats(len(self._recent), self._nbytes, self._max_bytes, *self._tally.copy())

    def close(self) -> None:
        """Ends the thread after its current read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            if len(self._entries) > 2 * len(self.registry) + 64:
                self._prune()
            self._entries[name] = _Entry()
        return self._entries[name]

    def _prune(self):
        """Forgets adapters whose folders are gone, so that records of short-lived names do not accumulate."""
        for name in [name for name in self._entries if name not in self.registry]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry:
            self._drop(name, entry)
            if entry.load is not Load.IDLE:
                self._move(entry, Load.IDLE)

    def _drop(self, name: str, entry: _Entry) -> None:
        """Removes an adapter from memory, if it is there; the record of its files stays."""
        if entry.packed is not None:
            if not entry.published:
                del self._recent[name]
                self._nbytes -= entry.packed.nbytes
            entry.packed = None
            entry.fresh = False

    def _hurry(self, name: str, entry: _Entry) -> None:
        """Moves the adapter before those that are only announced."""
        if entry.load in (Load.IDLE, Load.ANNOUNCED):
            self._queue(name, entry, Load.URGENT)

    def _queue(self, name: str, entry: _Entry, load: Load) -> None:
        if entry.load is Load.IDLE:
            entry.seen = None
            self._tally.add(name, "misses")
        self._move(entry, load)
        # An earlier announcement stays in the queue and is skipped.
        self._queues[load].append(name)

    def _move(self, entry: _Entry, load: Load) -> None:
        """Moves a load to another state, and wakes the threads that wait for it."""
        if load not in TRANSITIONS[entry.load]:
            raise RuntimeError(f"The load of an adapter cannot go from {entry.load.name} to {load.name}.")
        entry.load = load
        self._changed.notify_all()

    def _run(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(self._queues.values()))
                if self._closed:
                    return
                name, entry = self._next()
            if entry:
                self._load(name, entry)

    def _next(self) -> Tuple[str, Optional[_Entry]]:
        """Returns the next adapter to read; no entry if none is left."""
        load, queue = next((load, queue) for load, queue in self._queues.items() if queue)
        name = queue.popleft()
        entry = self._entries.get(name)
        if not entry or entry.load is not load:
            return name, None
        if load is Load.ANNOUNCED and self._is_full_of_fresh_ones():
            # It is read once a slot waits for it. Reading it now would evict one that is needed sooner.
            self._move(entry, Load.IDLE)
            return name, None
        self._move(entry, Load.READING)
        return name, entry

    def _is_full_of_fresh_ones(self) -> bool:
        fresh = (entry.packed.nbytes for name in self._recent if (entry := self._entries[name]).fresh)
        return 2 * sum(fresh) > self._max_bytes

    def _load(self, name: str, entry: _Entry) -> None:
        for attempt in range(_ATTEMPTS):
            begin = time.perf_counter()
            stamp, packed, error = self._read(name)
            with self._changed:
                if self._entries.get(name) is not entry:
                    return
                if entry.seen not in (None, stamp) and attempt + 1 < _ATTEMPTS:
                    entry.seen = None
                    continue
                self._tally.add(name, "seconds", time.perf_counter() - begin)
                self._keep(name, entry, stamp, packed, error)
                break
        if self.on_ready:
            self.on_ready(name)

    def _read(self, name: str) -> Tuple[Optional[Stamp], Any, Optional[LoraError]]:
        """Returns the stamp of the files that were read, and the result or the error of prepare."""
        path = name
        stamp = None
        try:
            path = self.registry.path(name)
            for pause in _PAUSES:
                time.sleep(pause)
                packed = error = None
                stamp = stamp_of(path)
                try:
                    packed = self._prepare(path)
                    self._check_size(packed, path)
                except LoraError as problem:
                    error = problem
                # Otherwise it may be half of one adapter and half of another.
                if stamp_of(path) == stamp:
                    return stamp, packed, error
            raise AdapterFormatError(f"{path} changes while it is read. Send the request again once it has been saved.")
        except LoraError as problem:
            return stamp, None, problem
        except Exception as problem:
            # Any error concerns this adapter alone; the others continue.
            logger.exception("%s: an adapter could not be read.", path)
            return stamp, None, AdapterFormatError(f"{path} cannot be read: {type(problem).__name__}: {problem}.")

    def _check_size(self, packed: Any, path: str) -> None:
        if packed.nbytes > self._max_bytes:
            raise AdapterError(
                f"{path} needs {packed.nbytes} bytes of host memory, but adapter_memory is {self._max_bytes}: serve "
                f"with --adapter-memory {packed.nbytes} or more."
            )

    def _keep(self, name: str, entry: _Entry, stamp: Optional[Stamp], packed: Any, error: Optional[LoraError]) -> None:
        self._move(entry, Load.IDLE)
        entry.forget()
        entry.stamp = stamp
        entry.error = error
        if error:
            logger.warning("Requests for %s are refused. Correct its files: %s", shown(name), error)
            self._tally.add(name, "failures")
            return
        entry.version = next(self._versions)
        entry.packed = packed
        entry.fresh = True
        self._tally.add(name, "loads")
        self._recent[name] = None
        self._nbytes += packed.nbytes
        while self._nbytes > self._max_bytes:
            oldest = next(iter(self._recent))
            self._drop(oldest, self._entries[oldest])
            self._tally.add(oldest, "evictions")


def _raise(entry: Optional[_Entry]) -> None:
    """Raises the error of an adapter that could not be read, without its traceback, which would grow each time."""
    if entry and entry.error:
        raise entry.error.with_traceback(None)
