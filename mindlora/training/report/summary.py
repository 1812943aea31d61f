"""The key figures of a run."""

from typing import List, Optional, Tuple

import numpy as np

from mindlora.training.history import History
from mindlora.training.report.curves import smoothed
from mindlora.training.report.scales import unit_of_bytes


def summary(history: History) -> List[Tuple[str, str]]:
    """Returns (label, value) of the figures that are known of a run."""
    figures = [
        ("Steps", _steps(history)),
        ("Training loss", _training_loss(history)),
        ("Held-out loss", _held_out_loss(history)),
        ("Tokens", _tokens(history)),
        ("Tokens per second, median", _median(history.series("tokens_per_second")[1])),
        ("Time in training", _duration(history)),
        ("Skipped steps", _skipped(history)),
        ("Most memory in use", _memory(history)),
        ("Resumed", ", ".join(f"at step {run['step']:,}" for run in history.runs[1:]) or None),
    ]
    return [(label, value) for label, value in figures if value is not None]


def _steps(history: History) -> Optional[str]:
    if not history.steps:
        return "0"
    total = history.runs[-1]["run"].get("total_steps") if history.runs else None
    done = history.steps[-1]["step"]
    return f"{done:,} of {total:,}" if total and total != done else f"{done:,}"


def _training_loss(history: History) -> Optional[str]:
    _, losses = history.series("loss")
    if not len(losses):
        return None
    return f"{losses[0]:.4g} → {smoothed(losses)[-1]:.4g}"


def _held_out_loss(history: History) -> Optional[str]:
    steps, losses = history.series("held_out_loss")
    if not np.isfinite(losses).any():
        return None
    best = int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
    return f"{losses[best]:.4g} at step {steps[best]:,}" + (
        "" if best == len(losses) - 1 else f", last {losses[-1]:.4g}"
    )


def _tokens(history: History) -> Optional[str]:
    _, tokens = history.series("tokens")
    return f"{np.nansum(tokens):,.0f}" if len(tokens) else None


def _median(values: np.ndarray) -> Optional[str]:
    values = values[np.isfinite(values)]
    return f"{np.median(values):,.0f}" if len(values) else None


def _duration(history: History) -> Optional[str]:
    """Returns the time from each start to the last step after it, without the pauses between them."""
    steps, times = history.series("time")
    if not len(steps) or not history.runs:
        return None
    begins = [run["step"] for run in history.runs] + [float("inf")]
    seconds = 0.0
    for run, begin, end in zip(history.runs, begins, begins[1:]):
        own = times[(steps > begin) & (steps <= end)]
        if len(own) and run["run"].get("time") is not None:
            seconds += own[-1] - run["run"]["time"]
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {round(seconds) % 60} s" if minutes else f"{seconds:.1f} s"


def _skipped(history: History) -> Optional[str]:
    known = [step["skipped"] for step in history.steps if step.get("skipped") is not None]
    return f"{sum(map(bool, known)):,}" if known else None


def _memory(history: History) -> Optional[str]:
    _, memory = history.series("memory_bytes")
    if not len(memory):
        return None
    factor, unit = unit_of_bytes(float(memory.max()))
    return f"{memory.max() / factor:.3g} {unit}"
