"""The interface of trackers, and what they get from a run."""

import dataclasses
import importlib.util
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows.

    Attributes:
        directory (str): The folder of its metrics.jsonl.
        step (int): The step at which it starts: 0 for a new run, the saved step for a resumed one.
        project (str or None): The project's name in the YAML, or None.
        name (str or None): The run's name in the YAML, or None.
        default_name (str): The name of a run without one.
        adapter (str or None): The run's adapter, if several train side by side.
        tags (tuple of str): The run's tags.
        id (str or None): The tracker's id of the run that this one continues; None for a new run.
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
        """Returns the run's name: its adapter's, the YAML's, ``given`` from the environment, or the default."""
        return self.adapter or self.name or given or self.default_name

    def group_or(self, given: Optional[str]) -> Optional[str]:
        """Returns the group of several adapters' runs; ``given`` for a run with one adapter."""
        return (self.name or given or self.default_name) if self.adapter else given


class Tracker:
    """A tracker of one run. A subclass's methods send their arguments, or raise whatever its package raises.

    The methods are called one after another, on the tracker's own thread.

    Attributes:
        package (str): The package that must be importable. The extra of mindlora that installs it has the tracker's
            name.
        on_main_thread (bool): Whether ``begin`` and ``end`` are called on the main thread.
    """

    package = ""
    on_main_thread = False

    @classmethod
    def is_installed(cls) -> bool:
        """Returns whether the tracker's package is installed."""
        return importlib.util.find_spec(cls.package) is not None

    def begin(self, run: TrackedRun) -> str:
        """Begins or continues a run; returns the tracker's id of it."""
        raise NotImplementedError

    def configuration(self, facts: Mapping[str, Any]) -> None:
        """Sends the run's configuration, data, versions and machine; a resumed run sends them again."""
        raise NotImplementedError

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Sends the measurements of a step, taken ``seconds`` after the start of 1970."""
        raise NotImplementedError

    def event(self, step: int, kind: str, message: str) -> None:
        """Sends an event that a guard, a schedule or the adapter's health reported at a step."""
        raise NotImplementedError

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        """Sends answers of SampleAnswers, each a "prompt" and an "answer"."""
        raise NotImplementedError

    def report(self, path: str) -> None:
        """Sends the run's page, report.html."""
        raise NotImplementedError

    def end(self, failed: bool) -> None:
        """Ends the run; ``failed`` says whether an error ended training."""
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
    """Returns {name: value} of the numbers in a record of metrics.jsonl, except its step and time.

    Numbers of "health" have names like ``health/CELL/parts/A/norm``; lists (findings, singular values) are left out.
    """
    health = record.get("health") or {}
    fields = {key: value for key, value in record.items() if key not in ("step", "time", "health")}
    fields.update(flattened(health.get("cells") or {}, "/", "health/"))
    return {name: float(value) for name, value in fields.items() if isinstance(value, (int, float))}


def as_text(answers: Sequence[Mapping[str, str]]) -> List[str]:
    """Returns each prompt with its answer, as Markdown."""
    return [f"**{row['prompt']}**\n\n{row['answer']}" for row in answers]
