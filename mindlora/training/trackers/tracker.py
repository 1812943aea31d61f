"""What every tracker gets from a run."""

import dataclasses
import importlib.util
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows.

    Attributes:
        directory (str): The folder of its metrics.jsonl.
        step (int): The step at which it starts: 0 for a new run, the saved step for a resumed one.
        project (str or None): What the YAML calls the project; None where it says nothing.
        name (str or None): What the YAML calls the run.
        default_name (str): What a run without a name is called.
        adapter (str or None): The adapter that the run is of, where several train side by side.
        tags (tuple of str): Its tags.
        id (str or None): What the tracker called the run that this one goes on with; None for a new one.
    """

    directory: str
    step: int
    project: Optional[str]
    name: Optional[str]
    default_name: str
    adapter: Optional[str]
    tags: Tuple[str, ...]
    id: Optional[str]

    def name_or(self, given: Optional[str]) -> str:
        """Returns the run's name: that of its adapter, of the YAML, ``given`` of the environment, or the default."""
        return self.adapter or self.name or given or self.default_name

    def group_or(self, given: Optional[str]) -> Optional[str]:
        """Returns what the runs of several adapters have in common; ``given`` for a run with one."""
        return (self.name or given or self.default_name) if self.adapter else given


class Tracker:
    """A tracker of one run. A subclass sends what its methods are told, or raises whatever its package raises.

    All are called one after another, on a thread of the tracker's own.

    Attributes:
        package (str): What has to be importable. The extra of mindlora that installs it is called like the tracker.
        on_main_thread (bool): Whether ``begin`` and ``end`` are called on the main thread.
    """

    package = ""
    on_main_thread = False

    @classmethod
    def is_installed(cls) -> bool:
        """Returns whether the tracker's package is there."""
        return importlib.util.find_spec(cls.package) is not None

    def begin(self, run: TrackedRun) -> str:
        """Begins a run or goes on with one; returns what the tracker calls it."""
        raise NotImplementedError

    def configuration(self, facts: Mapping[str, Any]) -> None:
        """Takes the run's configuration, data, versions and machine; a resumed run has them again."""
        raise NotImplementedError

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Takes what was measured at a step, some ``seconds`` after 1970."""
        raise NotImplementedError

    def event(self, step: int, kind: str, message: str) -> None:
        """Takes what a guard, a schedule or the adapter's health reported at a step."""
        raise NotImplementedError

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        """Takes answers of SampleAnswers, each a "prompt" and an "answer"."""
        raise NotImplementedError

    def report(self, path: str) -> None:
        """Takes the run's page, report.html."""
        raise NotImplementedError

    def end(self, failed: bool) -> None:
        """Ends the run, which an error may have ended."""
        raise NotImplementedError


def flattened(node: Mapping[str, Any], separator: str = ".", before: str = "") -> Dict[str, Any]:
    """Returns {joined keys: value} of a mapping of mappings."""
    flat: Dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, separator, f"{before}{key}{separator}"))
        else:
            flat[f"{before}{key}"] = value
    return flat


def measured(record: Mapping[str, Any]) -> Dict[str, float]:
    """Returns {name: value} of the numbers of a record of metrics.jsonl, but its step and its time.

    Those of "health" are called ``health/CELL/parts/A/norm``; lists, its findings and singular values, are left out.
    """
    health = record.get("health") or {}
    fields = {key: value for key, value in record.items() if key not in ("step", "time", "health")}
    fields.update(flattened(health.get("cells") or {}, "/", "health/"))
    return {name: float(value) for name, value in fields.items() if isinstance(value, (int, float))}


def as_text(answers: Sequence[Mapping[str, str]]) -> List[str]:
    """Returns each prompt with its answer, as Markdown."""
    return [f"**{row['prompt']}**\n\n{row['answer']}" for row in answers]
