"""Counts: how often a tier of the adapter cache had what was asked for, in all and for each adapter."""

import dataclasses
from typing import Dict, Protocol, Tuple


@dataclasses.dataclass
class Counts:
    """What happened in one tier since the server started.

    Attributes:
        hits, misses (int): How often the tier had the adapter, and how often it had to be brought there.
        loads (int): Adapters brought there: read from disk, or copied into a slot.
        evictions (int): Adapters that had to make room for others.
        failures (int): Adapters that could not be read.
        seconds (float): Spent on loads and failures.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    failures: int = 0
    seconds: float = 0.0


class Known(Protocol):
    """Names that can be counted and looked up."""

    def __len__(self) -> int: ...

    def __contains__(self, name: str) -> bool: ...


class Tally:
    """Counts in all and by adapter. Its owner sees to it that one thread uses it at a time.

    Args:
        known (Known): The adapters that there are; now and then the counts of others are dropped.
    """

    def __init__(self, known: Known):
        self._known, self._all = known, Counts()
        self._adapters: Dict[str, Counts] = {}

    def add(self, name: str, field: str, amount: float = 1) -> None:
        """Adds ``amount`` to a field of Counts, in all and for the adapter ``name``."""
        if name not in self._adapters:
            if len(self._adapters) > 2 * len(self._known) + 64:
                self._adapters = {old: counts for old, counts in self._adapters.items() if old in self._known}
            self._adapters[name] = Counts()
        for counts in (self._all, self._adapters[name]):
            setattr(counts, field, getattr(counts, field) + amount)

    def copy(self) -> Tuple[Counts, Dict[str, Counts]]:
        """Returns the counts in all and by adapter as they are now."""
        return dataclasses.replace(self._all), {
            name: dataclasses.replace(counts) for name, counts in self._adapters.items()
        }
