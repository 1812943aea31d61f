"""The charts of a page: their quantities, one thinned curve for each run, and axes."""

import dataclasses
import math
from typing import Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from mindlora.training.report.history import History

# A range of more than this ratio is shown on a logarithmic axis, if the quantity allows it.
_LOGARITHMIC_ABOVE = 100.0
# Values of more than this times the 99th percentile are spikes.
_SPIKE = 3.0


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        ticks (list): (value, label) of each tick.
        logarithmic (bool): Whether equal distances are equal ratios.
        is_cut (bool): Whether some values lie beyond the end of the axis.
    """

    low: float
    high: float
    ticks: List[Tuple[float, str]]
    logarithmic: bool = False
    is_cut: bool = False

    def fraction(self, values: np.ndarray) -> np.ndarray:
        """Returns values' positions on the axis, 0 at its beginning and 1 at its end; NaN for values without one."""
        values = np.asarray(values, np.float64)
        if self.logarithmic:
            positive = np.where(values > 0, values, np.nan)
            return np.log(positive / self.low) / math.log(self.high / self.low)
        return (values - self.low) / (self.high - self.low)


def step_axis(first: int, last: int) -> Axis:
    """Returns the axis of training steps with ticks at whole steps; it begins at 0 if ``first`` is near."""
    low, high = 0.0 if first <= 0.1 * last else float(first), float(last)
    if low == high:
        low, high = low - 1, high + 1
    distance = max(1.0, _distance(high - low, 6))
    return Axis(low, high, [(tick, f"{tick:,.0f}") for tick in _multiples(low, high, distance)])


def value_axis(
    values: np.ndarray, from_zero: bool = False, may_be_logarithmic: bool = False, cuts_spikes: bool = False
) -> Axis:
    """Returns an axis for all finite ``values``, or all except rare spikes.

    Args:
        from_zero (bool): Whether the axis begins at or below 0.
        may_be_logarithmic (bool): Whether the axis is logarithmic if the values differ by more than a factor of 100.
        cuts_spikes (bool): Whether values above three times the 99th percentile are left out.
    """
    values = values[np.isfinite(values)]
    if cuts_spikes and len(values) and values.max() > _SPIKE * np.percentile(values, 99) > 0:
        low_values = values[values <= _SPIKE * np.percentile(values, 99)]
        return dataclasses.replace(value_axis(low_values, from_zero, may_be_logarithmic), is_cut=True)
    positive = values[values > 0]
    if may_be_logarithmic and len(positive) and positive.max() > _LOGARITHMIC_ABOVE * positive.min():
        return _logarithmic(positive.min(), positive.max())
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low = min(low, 0.0) if from_zero else low
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (0.0 if from_zero else low - margin), high + margin
    distance = _distance(high - low, 5)
    low, high = math.floor(low / distance) * distance, math.ceil(high / distance) * distance
    ticks = _multiples(low, high, distance)
    return Axis(low, high, list(zip(ticks, _labels(ticks, distance))))


def unit_of_bytes(largest: float) -> Tuple[float, str]:
    """Returns the best unit for ``largest`` bytes: (bytes in the unit, its name)."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024.0**power, unit
    return 1.0, "B"


def _logarithmic(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    powers = range(first, last + 1, every)
    return Axis(10.0**first, 10.0**last, [(10.0**power, _power_of_ten(power)) for power in powers], True)


def _power_of_ten(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"


def _distance(extent: float, most: int) -> float:
    """Returns the smallest 1, 2 or 5 times a power of ten that divides ``extent`` into at most ``most`` parts."""
    power = 10.0 ** math.floor(math.log10(extent / most))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= extent * (1 - 1e-9))


def _multiples(low: float, high: float, distance: float) -> List[float]:
    slack = 1e-9 * distance
    first, last = math.ceil((low - slack) / distance), math.floor((high + slack) / distance)
    return [number * distance for number in range(first, last + 1)]


def _labels(ticks: List[float], distance: float) -> List[str]:
    largest = max(map(abs, ticks))
    if 1e-3 <= largest < 1e6:
        decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
        return [f"{tick:,.{decimals}f}" for tick in ticks]
    # The ticks share the power of ten of the largest, so that they can be compared at a glance.
    power = math.floor(math.log10(largest) + 1e-9)
    decimals = max(0, power - math.floor(math.log10(distance) + 1e-9))
    return [f"{tick / 10.0**power:.{decimals}f}e{power}" if tick else "0" for tick in ticks]


# The size of the picture, in units of its viewBox; the plot lies inside the margins.
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 10, 40
# Maximum number of points of all lines in a chart, so that the page of a long run, or of many runs, stays small.
_POINTS = 2400
# Events closer together than this share a mark.
_MARK = 4
# The axis of steps, and its events as (step, color, text).
_Timeline = Tuple[Axis, List[Tuple[int, int, str]]]
# field of a step, title, whether its unit is bytes, whether the axis begins at 0, whether it may be logarithmic
_QUANTITIES = (
    ("forgetting", "Divergence from the base on its own samples (nats per token)", False, True, False),
    ("learning_rate", "Learning rate", False, True, False),
    ("gradient_norm", "Norm of the gradient before clipping", False, False, True),
    ("tokens_per_second", "Tokens per second", False, True, False),
    ("bytes_exchanged", "Sent to the other devices in a step", True, True, False),
    ("memory_bytes", "Memory", True, True, False),
)


# The charts of classifiers and of preference training: field of a step, title.
_LEARNED = (
    ("accuracy", "Share of the labels that are right"),
    ("f1", "F1, the mean over labels"),
    ("reward", "Reward of the answers"),
    ("teacher/kl", "Divergence of the answers from the teacher, in nats per token"),
    ("teacher/divergence", "Divergence of the distributions from the teacher's, in nats per token"),
    ("frac_reward_zero_std", "Share of prompts whose answers all have one reward"),
    ("completions/mean_length", "Tokens of an answer"),
    ("completions/clipped_ratio", "Share of answers that were cut"),
    ("clip_ratio/region_mean", "Share of clipped ratios"),
    ("agreement/max", "Largest difference between sampler and trainer, in nats"),
    ("reward_accuracy", "Share of the examples with the right reward"),
    ("reward_margin", "Reward of the chosen answer above the rejected one's"),
    ("reward_chosen", "Reward of the chosen answer"),
    ("reward_rejected", "Reward of the rejected answer"),
    ("log_probability_chosen", "Log-probability of the chosen answer"),
    ("log_probability_rejected", "Log-probability of the rejected answer"),
    ("kl", "Distance from the reference"),
)


class Line(NamedTuple):
    """One curve: ``values`` [n] in the unit of the chart, NaN or infinite where not finite, at ``steps`` [n].

    Attributes:
        label (str): The curve's name in the legend; empty if the legend leaves it out.
        color (int): The number of its colour on the page.
        style (str): "line", "faint", or "marked" for a line with a dot at each value.
    """

    label: str
    color: int
    style: str
    steps: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart in the form that the page draws.

    Attributes:
        x_ticks, y_ticks (list): (position, label).
        paths (list): (color, style, path data) of each line.
        legend (list): (color, style, label).
        not_finite (list of float): Positions of steps at which a value was NaN or infinite.
        events (list): (position, color, text).
        data (dict): The lines as numbers, which the page shows under the mouse.
    """

    title: str
    x_ticks: List[Tuple[float, str]]
    y_ticks: List[Tuple[float, str]]
    paths: List[Tuple[int, str, str]]
    legend: List[Tuple[int, str, str]]
    not_finite: List[float]
    events: List[Tuple[float, int, str]]
    data: dict


def charts(histories: Sequence[History], names: Sequence[str]) -> List[Chart]:
    """Returns the charts of all quantities that at least one run has; a run's number is its colour."""
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
    if all(map(is_of_policy, histories)):
        drawn = []
    drawn += [_learned(histories, names, timeline, field, title) for field, title in _LEARNED]
    for field, title, in_bytes, from_zero, may_be_logarithmic in _QUANTITIES:
        lines = _lines(histories, names, field)
        factor, unit = _bytes(lines) if in_bytes else (1.0, "")
        lines = [line._replace(values=line.values / factor) for line in lines]
        drawn.append(draw(title, unit, lines, *timeline, from_zero, may_be_logarithmic) if lines else None)
    return [chart for chart in drawn if chart]


def is_of_policy(history: History) -> bool:
    """Returns whether a run learned from rewards: a policy's loss says nothing about its quality."""
    return len(history.series("reward")[0]) > 0


def _loss_unit(histories: Sequence[History]) -> str:
    """Returns the unit of the losses, which is empty for runs that learn from preferences or rewards."""
    measures = [history.series(name)[0] for history in histories for name in ("reward_chosen", "reward", "teacher/kl")]
    return "" if any(map(len, measures)) else "nats per token"


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
    return (
        draw("Loss", _loss_unit([history]), lines, *timeline, may_be_logarithmic=True, cuts_spikes=True)
        if lines
        else None
    )


def _losses(histories: Sequence[History], names: Sequence[str], timeline: _Timeline):
    """Returns a chart of smoothed training losses, and a chart of held-out losses."""
    training = [line._replace(values=smoothed(line.values)) for line in _lines(histories, names, "loss")]
    held_out = [line._replace(style="marked") for line in _lines(histories, names, "held_out_loss")]
    return [
        draw(title, _loss_unit(histories), lines, *timeline, may_be_logarithmic=True, cuts_spikes=True)
        for title, lines in (("Training loss, mean of the steps around", training), ("Held-out loss", held_out))
        if lines
    ]


def _learned(histories: Sequence[History], names: Sequence[str], timeline: _Timeline, field: str, title: str):
    """Returns a chart of a measure of preferences or rewards, in training and on held-out data, or None."""
    training = [line._replace(values=smoothed(line.values)) for line in _lines(histories, names, field)]
    lines = training + [line._replace(style="marked") for line in _lines(histories, names, f"held_out_{field}")]
    return draw(title, "", lines, *timeline) if lines else None


def _lines(histories: Sequence[History], names: Sequence[str], field: str) -> List[Line]:
    series = [history.series(field) for history in histories]
    return [
        Line(name if len(names) > 1 else field.replace("_", " "), number, "line", steps, values)
        for number, (name, (steps, values)) in enumerate(zip(names, series))
        if len(steps)
    ]


def _bytes(lines: Sequence[Line]) -> Tuple[float, str]:
    values = np.concatenate([line.values for line in lines]) if lines else np.zeros(1)
    return unit_of_bytes(float(np.nanmax(values)))


def draw(
    title: str,
    unit: str,
    lines: Sequence[Line],
    x_axis: Axis,
    events: Sequence[Tuple[int, int, str]],
    from_zero: bool = False,
    may_be_logarithmic: bool = False,
    cuts_spikes: bool = False,
) -> Chart:
    """Returns the chart of ``lines``, at least one of which has a point; the first line is drawn first.

    Args:
        unit (str): May be empty.
        events (sequence): The marks on the time line, as (step, color, text).
        from_zero (bool): Whether the axis of values begins at or below 0.
        cuts_spikes (bool): Whether the axis leaves out rare spikes, which then end at the upper edge.
    """
    y_axis = value_axis(np.concatenate([line.values for line in lines]), from_zero, may_be_logarithmic, cuts_spikes)
    thinned = [thin(line, max(100, _POINTS // len(lines))) for line in lines]
    notes = [note for note, holds in (("logarithmic", y_axis.logarithmic), ("spikes cut off", y_axis.is_cut)) if holds]
    units = ", ".join(([unit] if unit else []) + notes)
    not_finite = np.concatenate([line.steps[~np.isfinite(line.values)] for line in lines])
    return Chart(
        title=f"{title} ({units})" if units else title,
        x_ticks=[(float(_x(x_axis, tick)), label) for tick, label in x_axis.ticks],
        y_ticks=[(float(_y(y_axis, tick)), label) for tick, label in y_axis.ticks],
        paths=[path for line in thinned for path in _paths(line, x_axis, y_axis)],
        legend=[(line.color, line.style, line.label) for line in lines if line.label],
        not_finite=np.unique(np.round(_x(x_axis, not_finite))).tolist(),
        events=_marks(events, x_axis),
        data={"x": [x_axis.low, x_axis.high], "lines": [_data(line) for line in thinned if line.label]},
    )


def thin(line: Line, most: int) -> Line:
    """Returns a line of at most ``most`` points: the smallest and the largest value of each section."""
    if len(line.steps) <= most:
        return line
    kept = []
    edges = np.linspace(0, len(line.steps), most // 2 + 1).astype(np.int64)
    for start, end in zip(edges[:-1], edges[1:]):
        part = line.values[start:end]
        if np.isfinite(part).any():
            low = start + int(np.nanargmin(np.where(np.isfinite(part), part, np.nan)))
            high = start + int(np.nanargmax(np.where(np.isfinite(part), part, np.nan)))
            kept += sorted({low, high})
        else:
            kept.append(start)
    return line._replace(steps=line.steps[kept], values=line.values[kept])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns the mean of the finite values around each value: 9 values, or 2 % if that is more; NaN for none."""
    half = max(4, len(values) // 100)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    starts = np.maximum(np.arange(len(values)) - half, 0)
    ends = np.minimum(np.arange(len(values)) + half + 1, len(values))
    count = counts[ends] - counts[starts]
    return (sums[ends] - sums[starts]) / np.where(count > 0, count, np.nan)


def _x(axis: Axis, steps) -> np.ndarray:
    return LEFT + axis.fraction(steps) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, values) -> np.ndarray:
    return HEIGHT - BOTTOM - np.minimum(axis.fraction(values), 1) * (HEIGHT - TOP - BOTTOM)


def _paths(line: Line, x_axis: Axis, y_axis: Axis) -> List[Tuple[int, str, str]]:
    """Returns (color, style, path data) of a line, interrupted at values that are not finite, and of its dots."""
    with np.errstate(invalid="ignore"):
        xs = _x(x_axis, line.steps)
        ys = _y(y_axis, np.where(np.isfinite(line.values), line.values, np.nan))
    parts = []
    dots = []
    pen_down = False
    for x, y in zip(xs.tolist(), ys.tolist()):
        if math.isnan(y):
            pen_down = False
            continue
        # h0 draws a segment of no length: a dot, because lines have round ends.
        dots.append(f"M{x:.1f} {y:.1f}h0")
        parts.append(f"L{x:.1f} {y:.1f}" if pen_down else dots[-1])
        pen_down = True
    paths = [(line.color, line.style, "".join(parts))]
    return paths + [(line.color, "dots", "".join(dots))] if line.style == "marked" else paths


def _marks(events: Sequence[Tuple[int, int, str]], axis: Axis) -> List[Tuple[float, int, str]]:
    """Returns (position, color, text) of the events; nearby events are joined at the first of them."""
    places: Dict[Tuple[int, int], Tuple[float, List[str]]] = {}
    for step, color, text in events:
        if axis.low <= step <= axis.high:
            x = float(_x(axis, step))
            _, texts = places.setdefault((round(x / _MARK), color), (round(x, 1), []))
            texts.append(f"step {step:,}: {text}")
    return [
        (x, color, "\n".join(texts[:3] + ([f"and {len(texts) - 3} more"] if len(texts) > 3 else [])))
        for (_, color), (x, texts) in places.items()
    ]


def _data(line: Line) -> dict:
    values = [float(f"{value:.5g}") if np.isfinite(value) else str(value) for value in line.values.tolist()]
    return {"label": line.label, "color": line.color, "steps": line.steps.tolist(), "values": values}
