"""The picture of an evaluation: what each adapter changes, with its interval."""

from typing import Any, Sequence

from mindlora.serving.evaluation.report import EvalReport, title
from mindlora.serving.evaluation.statistics import BETTER, WORSE, Estimate, Measure

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
    """Returns how far an interval reaches to both sides, as errorbar takes it."""
    if value.low is None or value.high is None:
        return [[0.0], [0.0]]
    return [[value.value - value.low], [value.high - value.value]]
