"""The training runs below a folder and their progress, from metrics.jsonl and the files beside it."""

import dataclasses
import datetime
import glob
import os
import time
from typing import List, Optional, Tuple

import numpy as np

from mindlora.core.errors import DataError
from mindlora.core.text import columns, wrapped
from mindlora.training.report.history import FILE_NAME, History, read_history

# Kinds of events that end a run.
_ENDS = {"stop": "stopped", "early_stop": "finished", "divergence": "failed"}
# A run is silent if it has written nothing for this many times its longest pause so far, and for this many seconds: at
# least, and while it loads the base and compiles.
_PAUSES, _LEAST, _BEFORE_STEPS = 10, 300.0, 1800.0


@dataclasses.dataclass(frozen=True)
class ListedRun:
    """A run in the list.

    Attributes:
        path (str): Its folder.
        state (str): running; finished; stopped, by a signal; failed; silent (neither ended nor writing); or unreadable.
        step, steps (int or None): The last step, and the planned number of steps.
        loss (float or None): The training loss of the last step.
        held_out_loss, held_out_step (float and int, or None): The lowest held-out loss, and its step.
        written (float): When the run's history was last written, in seconds since 1970.
        problem (str or None): Why the run is unreadable.
    """

    path: str
    state: str
    step: Optional[int]
    steps: Optional[int]
    loss: Optional[float]
    held_out_loss: Optional[float]
    held_out_step: Optional[int]
    written: float
    problem: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class RunList:
    """The runs below a folder, in the order of their paths."""

    folder: str
    runs: Tuple[ListedRun, ...]

    def __str__(self) -> str:
        titles = ("run", "state", "step", "loss", "held-out loss", "last written (UTC)")
        table = columns(titles, [self._row(run) for run in self.runs])
        problems = [wrapped("", run.problem) for run in self.runs if run.problem is not None]
        return "\n".join([table, *problems])

    def _row(self, run: ListedRun) -> Tuple[str, ...]:
        steps = "-" if run.step is None else f"{run.step} of {run.steps}" if run.steps else str(run.step)
        best = "-" if run.held_out_loss is None else f"{run.held_out_loss:.4g} at step {run.held_out_step}"
        loss = "-" if run.loss is None else f"{run.loss:.4g}"
        written = datetime.datetime.fromtimestamp(run.written, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")
        return os.path.relpath(run.path, self.folder), run.state, steps, loss, best, written


def list_runs(folder: str, now: Optional[float] = None) -> RunList:
    """Finds the training runs in a folder and below it.

    Args:
        folder (str): Where to look.
        now (float, optional): The current time, in seconds since 1970. Default: None, the clock's time.

    Raises:
        DataError: The folder does not exist, or holds no run.
    """
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is not a folder: name one that training runs write to.")
    paths = sorted(path for path, _, names in os.walk(folder) if FILE_NAME in names)
    if not paths:
        raise DataError(
            f"{folder} and its subfolders hold no {FILE_NAME}, which every training run writes to its output folder: "
            "name that folder or one above it."
        )
    return RunList(folder, tuple(_listed(path, time.time() if now is None else now) for path in paths))


def _listed(path: str, now: float) -> ListedRun:
    written = os.path.getmtime(os.path.join(path, FILE_NAME))
    try:
        history = read_history(path)
    except DataError as error:
        return ListedRun(path, "unreadable", None, None, None, None, None, written, str(error))
    run = history.runs[-1] if history.runs else {"step": 0, "run": {}}
    steps = run["run"].get("total_steps")
    step = history.steps[-1]["step"] if history.steps else run["step"]
    _, losses = history.series("loss")
    best = _best(history)
    return ListedRun(
        path=path,
        state=_state(history, run, step, now - written),
        step=step,
        steps=steps,
        loss=float(losses[-1]) if len(losses) else None,
        held_out_loss=best[0],
        held_out_step=best[1],
        written=written,
    )


def _best(history: History) -> Tuple[Optional[float], Optional[int]]:
    """Returns the lowest held-out loss and its step."""
    steps, losses = history.series("held_out_loss")
    finite = np.isfinite(losses)
    if not finite.any():
        return None, None
    best = int(np.argmin(np.where(finite, losses, np.inf)))
    return float(losses[best]), int(steps[best])


def _state(history: History, run: dict, step: int, silence: float) -> str:
    """Returns the state of a run that was last begun or resumed with the record ``run``."""
    steps = run["run"].get("total_steps")
    if steps and step >= steps:
        return "finished"
    # Events at the step from which a run was resumed happened before the resumption.
    for event in reversed([event for event in history.events if event["step"] > run["step"]]):
        if event["event"] in _ENDS:
            return _ENDS[event["event"]]
        # After going back, ForgettingBudget continues or ends the run.
        if event["message"].endswith("the run ends."):
            return "finished"
    if _has_failed(history.directory, run["run"].get("time") or 0.0):
        return "failed"
    return "silent" if silence > _patience(history, run) else "running"


def _has_failed(directory: str, began: float) -> bool:
    """Returns whether the run that began at a time has left an error's traceback."""
    tracebacks = glob.glob(os.path.join(glob.escape(directory), "log", "rank_*", "traceback.txt"))
    return any(os.path.getmtime(path) > began for path in tracebacks)


def _patience(history: History, run: dict) -> float:
    """Returns the number of seconds without a record after which a run counts as silent."""
    times: List[float] = [step["time"] for step in history.steps if step["step"] > run["step"] and step["time"]]
    if len(times) < 2:
        return _BEFORE_STEPS
    return max(_LEAST, _PAUSES * float(np.diff(times).max()))
