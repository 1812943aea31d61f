"""Busiest: names that have labels of their own in the metrics, so that their number stays bounded."""

from typing import Callable, Dict, List

OTHER = "other"


class Busiest:
    """Gives the names that are used most a label each, and all others "other".

    A name takes another's place when it has clearly been used more. A counter's series then ends, and one begins at 0:
    no series ever falls, which Prometheus would take for a restart.

    Args:
        count (int): Names with a label of their own.
        forget (callable): Called with a name that has lost its label.
    """

    def __init__(self, count: int, forget: Callable[[str], None]):
        self._count, self._forget = count, forget
        self._used: Dict[str, int] = {}
        self._shown: Dict[str, None] = {}

    @property
    def shown(self) -> List[str]:
        """The names that have a label of their own."""
        return list(self._shown)

    def label(self, name: str) -> str:
        """Counts one use of a name, and returns its label."""
        used = self._used[name] = self._used.get(name, 0) + 1
        if name in self._shown:
            return name
        if len(self._shown) >= self._count:
            least = min(self._shown, key=lambda shown: self._used[shown])
            if used < 10 + 1.1 * self._used[least]:
                return OTHER
            del self._shown[least]
            self._forget(least)
        self._shown[name] = None
        return name
