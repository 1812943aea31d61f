"""EvalReport: all measures of a base and its adapters, with a sentence on each result."""

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.text import columns, number, wrapped
from mindlora.serving.evaluation import texts
from mindlora.serving.evaluation.statistics import (
    BASE,
    BETTER,
    LEAST_EXAMPLES,
    NOT_TOLD_APART,
    WORSE,
    Estimate,
    Measure,
    measure,
)


@dataclasses.dataclass(frozen=True)
class EvalReport:
    """The result of ``mindlora eval``.

    Attributes:
        model (str): Name of the base.
        measures (tuple of Measure): In the requested order.
        verdicts (tuple of str): A sentence for each adapter.
    """

    model: str
    measures: Tuple[Measure, ...]
    verdicts: Tuple[str, ...] = dataclasses.field(init=False)

    def __post_init__(self):
        adapters = list(self.measures[0].differences)
        object.__setattr__(self, "verdicts", tuple(_sentence(adapter, self.measures) for adapter in adapters))

    def __str__(self) -> str:
        parts = [columns([table["title"], *table["rows"][0][1:]], table["rows"][1:]) for table in self.tables()]
        if self.verdicts:
            parts.append("\n".join(wrapped("", sentence) for sentence in self.verdicts))
        return "\n\n".join(parts)

    def tables(self) -> List[Dict[str, Any]]:
        """Returns {"title", "rows"} for each measure: rows of strings, the first of which names the columns."""
        return [{"title": title(found), "rows": _rows(found)} for found in self.measures]


def title(found: Measure) -> str:
    """Returns a title that names the measure and its data."""
    if found.name == texts.FORGETTING:
        return f"KL(base || adapter), nats per token, on {found.examples} {found.source}"
    return f"{found.name} of {found.source} ({found.examples} examples)"


def _rows(found: Measure) -> List[List[str]]:
    titles = ["model", "value", "95 % interval"]
    rows = [[name, number(value.value), interval(value)] for name, value in found.values.items()]
    if found.name == texts.FORGETTING:
        # The base's own value is 0.
        return [titles, *rows[1:]]
    if found.differences:
        titles += ["minus base", "95 % interval", ""]
        rows[0] += ["", "", ""]
        for row, (name, difference) in zip(rows[1:], found.differences.items()):
            row += [number(difference.value), interval(difference), found.verdicts[name]]
    return [titles, *rows]


def interval(value: Estimate) -> str:
    """Returns the interval of a value as text."""
    return "-" if value.low is None else f"{number(value.low)} to {number(value.high)}"


def _sentence(adapter: str, measures: Tuple[Measure, ...]) -> str:
    """Returns a sentence on whether an adapter is better than its base, worse, or the same, and by how much."""
    parts: List[str] = []
    judged = [found for found in measures if found.name != texts.FORGETTING]
    for verdict in (BETTER, WORSE):
        parts += [
            f"{verdict} in {found.name} of {found.source} ({number(found.values['base'].value)} to "
            f"{number(found.values[adapter].value)})"
            for found in judged
            if found.verdicts[adapter] == verdict
        ]
    parts += [_not_told_apart(found) for found in judged if found.verdicts[adapter] == NOT_TOLD_APART]
    moved = [
        f"{number(found.values[adapter].value)} nats per token away from the base's own answers"
        for found in measures
        if found.name == texts.FORGETTING
    ]
    return f"{adapter} against the base: {'; '.join(parts + moved)}."


def _not_told_apart(found: Measure) -> str:
    few = "" if found.examples >= LEAST_EXAMPLES else f", which are fewer than {LEAST_EXAMPLES}"
    return f"{NOT_TOLD_APART} by {found.examples} examples in {found.name} of {found.source}{few}"


# The picture of an evaluation: what each adapter changes, with its interval.

_COLORS = {BETTER: "tab:green", WORSE: "tab:red"}


def draw_evaluation(report: EvalReport, path: str) -> None:
    """Draws the values of the base and its adapters, a panel for each measure, to a PNG file; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(report.measures)
    height = 0.9 + 0.32 * len(report.measures[0].values)
    figure, panels = pyplot.subplots(count, 1, figsize=(8, height * count), dpi=110, squeeze=False)
    for axes, found in zip(panels[:, 0], report.measures):
        _draw(axes, found)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _draw(axes: Any, found: Measure) -> None:
    names = list(found.values)
    for place, (name, value) in enumerate(found.values.items()):
        color = _COLORS.get(found.verdicts.get(name, ""), "tab:gray")
        axes.errorbar(value.value, place, xerr=_reach(value), fmt="o", color=color, capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(title(found), fontsize="medium", loc="left")
    axes.grid(alpha=0.3, axis="x")


def _reach(value: Estimate) -> Sequence[Sequence[float]]:
    """Returns the extent of an interval to both sides, for errorbar."""
    if value.low is None or value.high is None:
        return [[0.0], [0.0]]
    return [[value.value - value.low], [value.high - value.value]]


# The best of several adapters by the losses of the same held-out rows, and those indistinguishable from it.


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The held-out losses, or rewards, of several adapters, each at its best step, and their distance from the best.

    Attributes:
        best (str): The adapter with the smallest loss, or with the largest reward.
        measure (Measure): Its "base" is the best adapter; the others follow, better ones first.
        steps (dict): Name -> the step at which the adapter was measured.
    """

    best: str
    measure: Measure
    steps: Dict[str, int]

    def __str__(self) -> str:
        titles, *rows = self.table()
        return f"{columns(titles, rows)}\n\n{self.sentence()}"

    def table(self) -> List[List[str]]:
        """Returns rows of strings, the first of which names the columns."""
        rows = [["adapter", self.measure.name, "95 % interval", "at step", "minus best", "95 % interval", ""]]
        for name, value in self.measure.values.items():
            adapter = self.best if name == BASE else name
            row = [adapter, number(value.value), interval(value), f"{self.steps[adapter]:,}"]
            difference = self.measure.differences.get(name)
            row += ["", "", "best"] if difference is None else [number(difference.value), interval(difference)]
            rows.append(row if difference is None else [*row, self.measure.verdicts[name]])
        return rows

    def sentence(self) -> str:
        """Returns a sentence on the rows."""
        near = [name for name, verdict in self.measure.verdicts.items() if verdict == NOT_TOLD_APART]
        extreme = "smallest" if self.measure.smaller_is_better else "largest"
        text = f"{self.best} has the {extreme} {self.measure.name}, {number(self.measure.values[BASE].value)}"
        if near:
            return f"{text}; {self.measure.examples} rows do not tell {', '.join(near)} apart from it."
        return f"{text}; all others are {WORSE}." if self.measure.verdicts else f"{text}."


def compare(
    losses: Mapping[str, np.ndarray],
    counts: np.ndarray,
    steps: Mapping[str, int],
    source: str,
    are_rewards: bool = False,
) -> Optional[Comparison]:
    """Returns which adapter is best; None if none has a finite loss.

    Args:
        losses (mapping): Name -> float64 [rows], the summed loss of each held-out row, or minus its reward.
        counts (array): float64 [rows], the number of counted labels in each row.
        steps (mapping): Name -> the step at which the adapter was measured.
        source (str): Name of the rows.
        are_rewards (bool): Whether the losses are rewards times -1. Default: False.
    """
    means = {name: float(rows.sum()) for name, rows in losses.items() if np.isfinite(rows).all()}
    if not means:
        return None
    best, *rest = sorted(means, key=lambda name: means[name])
    sign, measured = (-1, "held-out reward") if are_rewards else (1, "held-out loss")
    amounts = {None: sign * losses[best], **{name: sign * losses[name] for name in rest}}
    return Comparison(best, measure(measured, source, not are_rewards, amounts, counts), dict(steps))
