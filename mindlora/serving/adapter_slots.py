"""AdapterSlots: the adapters in the slots of the pools, and their users."""

import collections
import dataclasses
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from mindlora.core.errors import RequestError
from mindlora.serving.adapter_memory import AdapterMemory, Counts, Loaded, MemoryStats, Tally
from mindlora.serving.request import Lease


@dataclasses.dataclass(frozen=True)
class AdapterStats:
    """The state of the adapter cache.

    Attributes:
        registered (int): Adapters on disk.
        memory (MemoryStats): The tier in host memory.
        slots, used, leased (int): All slots, slots with an adapter, and slots that requests use.
        counts (Counts): A hit is a lease of an adapter with a slot, a miss one for which a slot was written.
    """

    registered: int
    memory: MemoryStats
    slots: int
    used: int
    leased: int
    pinned: List[str]
    counts: Counts
    adapters: Dict[str, Counts]


class _Slot:
    """A slot of the pools. ``name`` is None while it is empty, or holds an adapter that is closed to new requests."""

    def __init__(self, number: int):
        self.number = number
        self.name: Optional[str] = None
        self.version = 0
        self.invocation_tokens: Tuple[int, ...] = ()
        self.users = 0


class AdapterSlots:
    """The adapter cache for the scheduler and the server; it evicts the least recently used adapter.

    The thread of the engine calls begin_step, acquire and release; any thread may call the other methods. ``write``
    takes a slot and a result of memory's ``prepare``, copies it into the pools, and runs in acquire's thread.
    """

    def __init__(self, memory: AdapterMemory, slots: int, write: Callable[[int, Any], None]):
        self.memory = memory
        self.registry = memory.registry
        self._write = write
        self._tally = Tally(self.registry)
        self._lock = threading.Lock()
        self._slots = [_Slot(number) for number in range(slots)]
        # Name -> the slot with its newest version.
        self._current: Dict[str, _Slot] = {}
        # Numbers of unused slots in the order in which they are written: empty ones, then by their last use.
        self._idle: "collections.OrderedDict[int, None]" = collections.OrderedDict.fromkeys(range(slots))
        self._pinned: Set[str] = set()
        self._writes = self._asked = 0

    def begin_step(self) -> None:
        """Begins a step, in which one slot may be written."""
        self._writes = self._asked = 0

    def acquire(self, name: str) -> Optional[Lease]:
        """Returns a lease of a slot that holds the adapter; the adapter stays there until it is released.

        None if the adapter is being read, no slot is free, or this step has already written one.

        Raises LoraError if the adapter is no longer registered or its files cannot be used.
        """
        self.registry.path(name)
        version = self.memory.version(name)
        with self._lock:
            slot = self._current.get(name)
            if slot and slot.version == version:
                self._tally.add(name, "hits")
                return self._lease(slot)
            # Adapters are not read while no slot is available: they would only evict others from memory.
            if not self._victim(name) or self._asked >= max(1, len(self._idle)):
                return None
            self._asked += 1
        loaded = self.memory.take(name)
        if loaded is None or self._writes:
            return None
        with self._lock:
            victim = self._victim(name)
            if not victim:
                return None
            self._empty(victim, evicted=victim.name != name)
            self._idle.pop(victim.number, None)
        begin = time.perf_counter()
        try:
            self._write(victim.number, loaded.packed)
        except BaseException:
            with self._lock:
                self._make_idle(victim)
            raise
        self._writes += 1
        with self._lock:
            return self._place(name, victim, loaded, time.perf_counter() - begin)

    def release(self, lease: Lease) -> None:
        """Returns a lease to the cache. The adapter keeps its slot until another one needs it."""
        with self._lock:
            slot = self._slots[lease.slot]
            if not slot.users or slot.version != lease.version:
                raise RuntimeError(f"{lease} has been released already.")
            slot.users -= 1
            if not slot.users:
                self._make_idle(slot)

    def lacks_slot(self, name: str) -> bool:
        """Returns whether acquire fails because the leases of others use all slots."""
        with self._lock:
            return self._victim(name) is None

    def prefetch(self, name: str) -> None:
        """Checks the adapter's files when a request arrives, and starts reading them, if needed, before a slot does.

        Raises AdapterNotFoundError if it is not registered.
        """
        with self._lock:
            slot = self._current.get(name)
            held = slot.version if slot else None
        self.memory.prefetch(name, held)

    def pin(self, name: str) -> None:
        """Keeps the adapter in its slot once it has one, even if it is unused.

        Raises AdapterNotFoundError if it is not registered, or RequestError if no slot would be left for others.
        """
        self.prefetch(name)
        with self._lock:
            if len(self._pinned | {name}) >= len(self._slots):
                raise RequestError(
                    f"{len(self._slots)} slots cannot hold {len(self._pinned | {name})} pinned adapters and others "
                    "too: serve with more (--slots)."
                )
            self._pinned.add(name)
            slot = self._current.get(name)
            if slot:
                self._idle.pop(slot.number, None)

    def register(self, name: str, path: str, restricted: bool = True, replace: bool = False) -> None:
        """Adds an adapter and waits until it has been read and checked; after a LoraError, nothing has changed.

        If it replaces another, new requests get the new adapter, and running ones keep the old one. The arguments are
        as in AdapterRegistry.register.
        """
        before = self.registry.register(name, path, restricted, replace)
        try:
            self.memory.load(name)
        except BaseException:
            if before is None:
                self.unregister(name)
            else:
                self.registry.register(name, before, restricted=False, replace=True)
            raise

    def unregister(self, name: str) -> None:
        """Removes an adapter: it takes no more requests, and its slot is free once its running requests have ended.

        Raises AdapterNotFoundError if there is none of that name.
        """
        self.registry.unregister(name)
        self.memory.forget(name)
        with self._lock:
            self._pinned.discard(name)
            slot = self._current.get(name)
            if slot:
                self._empty(slot)
                if not slot.users:
                    self._make_idle(slot)

    def stats(self) -> AdapterStats:
        """Returns the state of the cache."""
        memory = self.memory.stats()
        with self._lock:
            leased = sum(slot.users > 0 for slot in self._slots)
            used = sum(slot.name is not None or slot.users > 0 for slot in self._slots)
            tally = self._tally.copy()
            return AdapterStats(
                len(self.registry), memory, len(self._slots), used, leased, sorted(self._pinned), *tally
            )

    def _victim(self, name: str) -> Optional[_Slot]:
        """Returns the slot for the adapter: the one with its old version if it is unused, or else the next."""
        old = self._current.get(name)
        if old and not old.users:
            return old
        return self._slots[next(iter(self._idle))] if self._idle else None

    def _place(self, name: str, slot: _Slot, loaded: Loaded, seconds: float) -> Lease:
        """Records that an adapter is in a slot; a slot with an older version is left to its users."""
        old = self._current.get(name)
        if old:
            self._empty(old)
        if name in self.registry:
            slot.name = name
            self._current[name] = slot
        slot.version = loaded.version
        slot.invocation_tokens = loaded.packed.invocation_tokens
        self._tally.add(name, "misses")
        self._tally.add(name, "loads")
        self._tally.add(name, "seconds", seconds)
        return self._lease(slot, name)

    def _lease(self, slot: _Slot, name: Optional[str] = None) -> Lease:
        slot.users += 1
        self._idle.pop(slot.number, None)
        return Lease(name or slot.name or "", slot.number, slot.version, slot.invocation_tokens)

    def _empty(self, slot: _Slot, evicted: bool = False) -> None:
        """Closes the slot's adapter to new requests."""
        if slot.name is None:
            return
        if evicted:
            self._tally.add(slot.name, "evictions")
        del self._current[slot.name]
        slot.name = None

    def _make_idle(self, slot: _Slot) -> None:
        if slot.name in self._pinned:
            return
        self._idle[slot.number] = None
        # Empty slots are written first.
        self._idle.move_to_end(slot.number, last=slot.name is not None)
