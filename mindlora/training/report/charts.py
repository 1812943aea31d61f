"""The charts of a page: which quantities there are, and a curve for each run."""

from typing import List, Sequence, Tuple

import numpy as np

from mindlora.training.history import History
from mindlora.training.report.curves import Chart, Line, draw, smoothed
from mindlora.training.report.scales import Axis, step_axis, unit_of_bytes

# The axis of steps, and (step, color, text) of the events on it.
_Timeline = Tuple[Axis, List[Tuple[int, int, str]]]
_LOSS_UNIT = "nats per token"
# field of a step, title, whether its unit is bytes, whether the axis begins at 0, whether it may be logarithmic
_QUANTITIES = (
    ("learning_rate", "Learning rate", False, True, False),
    ("gradient_norm", "Norm of the gradient before clipping", False, False, True),
    ("tokens_per_second", "Tokens per second", False, True, False),
    ("bytes_exchanged", "Sent to the other devices in a step", True, True, False),
    ("memory_bytes", "Memory in use", True, True, False),
)


def charts(histories: Sequence[History], names: Sequence[str]) -> List[Chart]:
    """Returns the charts of all quantities that at least one run has; each run has the colour of its number."""
    events = [
        (event["step"], number, event["message"] if len(names) == 1 else f"{names[number]}: {event['message']}")
        for number, history in enumerate(histories)
        for event in history.events
    ]
    steps = [record["step"] for history in histories for record in history.steps + history.held_out]
    if not steps:
        return []
    timeline = step_axis(min(steps), max(steps)), events
    drawn = [_loss_of_one(histories[0], timeline)] if len(histories) == 1 else _losses(histories, names, timeline)
    for field, title, in_bytes, from_zero, may_be_logarithmic in _QUANTITIES:
        lines = _lines(histories, names, field)
        factor, unit = _bytes(lines) if in_bytes else (1.0, "")
        lines = [line._replace(values=line.values / factor) for line in lines]
        drawn.append(draw(title, unit, lines, *timeline, from_zero, may_be_logarithmic) if lines else None)
    return [chart for chart in drawn if chart]


def _loss_of_one(history: History, timeline: _Timeline):
    lines = []
    steps, losses = history.series("loss")
    if len(steps):
        lines += [
            Line("training, each step", 0, "faint", steps, losses),
            Line("training, mean of the steps around", 0, "line", steps, smoothed(losses)),
        ]
    steps, held_out = history.series("held_out_loss")
    if len(steps):
        lines.append(Line("held-out", 1, "marked", steps, held_out))
    return draw("Loss", _LOSS_UNIT, lines, *timeline, may_be_logarithmic=True, cuts_spikes=True) if lines else None


def _losses(histories: Sequence[History], names: Sequence[str], timeline: _Timeline):
    """Returns a chart of training losses, each smoothed, and one of held-out losses."""
    training = [line._replace(values=smoothed(line.values)) for line in _lines(histories, names, "loss")]
    held_out = [line._replace(style="marked") for line in _lines(histories, names, "held_out_loss")]
    return [
        draw(title, _LOSS_UNIT, lines, *timeline, may_be_logarithmic=True, cuts_spikes=True)
        for title, lines in (("Training loss, mean of the steps around", training), ("Held-out loss", held_out))
        if lines
    ]


def _lines(histories: Sequence[History], names: Sequence[str], field: str) -> List[Line]:
    found = [history.series(field) for history in histories]
    return [
        Line(name if len(names) > 1 else field.replace("_", " "), number, "line", steps, values)
        for number, (name, (steps, values)) in enumerate(zip(names, found))
        if len(steps)
    ]


def _bytes(lines: Sequence[Line]) -> Tuple[float, str]:
    values = np.concatenate([line.values for line in lines]) if lines else np.zeros(1)
    return unit_of_bytes(float(np.nanmax(values)))
