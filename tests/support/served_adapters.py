"""Adapter files of one number, a cache above them, and a loader that waits for a word: for the tests of serving."""

import dataclasses
import os
import threading
import time

from mindlora.core.errors import TruncatedAdapterError
from mindlora.serving.adapter_memory import AdapterMemory, Load
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.adapter_slots import AdapterSlots

SECONDS = 20  # No test waits so long but for a defect.


@dataclasses.dataclass
class Packed:
    """What read() makes of a file."""

    value: int
    nbytes: int = 10
    invocation_tokens: tuple = ()


def read(path):
    """Reads a folder that put() wrote; a file without its last byte is refused."""
    with open(os.path.join(path, "adapter.safetensors"), encoding="ascii") as file:
        text = file.read()
    if not text.endswith("."):
        raise TruncatedAdapterError(f"{path} is truncated.")
    return Packed(int(text[:-1]))


def put(folder, name, value, end="."):
    """Writes an adapter of one number, in one step."""
    path = os.path.join(folder, name)
    os.makedirs(path, exist_ok=True)
    written = os.path.join(path, ".written")
    with open(written, "w", encoding="ascii") as file:
        file.write(f"{value}{end}")
    os.replace(written, os.path.join(path, "adapter.safetensors"))
    return path


class Reader:
    """Counts the reads of each adapter, and holds them back while ``gate`` is closed."""

    def __init__(self):
        self.reads, self.gate, self.begun = [], threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def __call__(self, path):
        self.reads.append(os.path.basename(path))
        self.begun.release()
        assert self.gate.wait(SECONDS)
        return read(path)

    def wait(self):
        """Waits until a read has begun."""
        assert self.begun.acquire(timeout=SECONDS)


class Pools:
    """Slots of one number each: what write() put there."""

    def __init__(self, count):
        self.values, self.writes = [None] * count, 0

    def write(self, slot, packed):
        self.values[slot] = packed.value
        self.writes += 1


def cache(folder, slots=2, room=10, reader=None, **registry):
    """Returns AdapterSlots with ``slots`` slots over memory for ``room`` adapters, its pools and its reader."""
    pools, reader = Pools(slots), reader or Reader()
    memory = AdapterMemory(AdapterRegistry(str(folder), **registry), reader, 10 * room)
    return AdapterSlots(memory, slots, pools.write), pools, reader


def settled(memory):
    """Waits until nothing is being read or waits to be."""
    until(lambda: all(entry.load is Load.IDLE for entry in list(memory._entries.values())))


def until(condition):
    """Waits for a condition."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def lease(slots, name):
    """Returns a lease as an engine gets it: announced, then asked for step by step."""
    slots.prefetch(name)
    end = time.monotonic() + SECONDS
    while True:
        slots.begin_step()
        found = slots.acquire(name)
        if found:
            return found
        assert time.monotonic() < end
        time.sleep(0.0005)
