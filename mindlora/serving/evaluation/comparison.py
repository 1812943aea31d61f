"""Which of several adapters is best, by the losses of the same held-out rows, and which are not told apart from it."""

import dataclasses
from typing import Dict, List, Mapping, Optional

import numpy as np

from mindlora.core.tables import columns, number
from mindlora.serving.evaluation.report import interval
from mindlora.serving.evaluation.statistics import BASE, NOT_TOLD_APART, WORSE, Measure, measure


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The held-out losses of several adapters, each at its best step, and how far they are above the best one's.

    Attributes:
        best (str): The adapter with the smallest loss.
        measure (Measure): Its "base" is the best adapter; the others are the rest, the better ones first.
        steps (dict): Name -> the step at which the adapter was measured so.
    """

    best: str
    measure: Measure
    steps: Dict[str, int]

    def __str__(self) -> str:
        titles, *rows = self.table()
        return f"{columns(titles, rows)}\n\n{self.sentence()}"

    def table(self) -> List[List[str]]:
        """Returns rows of texts, the first of which names the columns."""
        rows = [["adapter", "held-out loss", "95 % interval", "at step", "minus best", "95 % interval", ""]]
        for name, value in self.measure.values.items():
            adapter = self.best if name == BASE else name
            row = [adapter, number(value.value), interval(value), f"{self.steps[adapter]:,}"]
            difference = self.measure.differences.get(name)
            row += ["", "", "best"] if difference is None else [number(difference.value), interval(difference)]
            rows.append(row if difference is None else [*row, self.measure.verdicts[name]])
        return rows

    def sentence(self) -> str:
        """Returns what the rows tell."""
        near = [name for name, verdict in self.measure.verdicts.items() if verdict == NOT_TOLD_APART]
        text = f"{self.best} has the smallest held-out loss, {number(self.measure.values[BASE].value)}"
        if near:
            return f"{text}; {self.measure.examples} rows do not tell {', '.join(near)} apart from it."
        return f"{text}; all others are {WORSE}." if self.measure.verdicts else f"{text}."


def compare(
    losses: Mapping[str, np.ndarray], counts: np.ndarray, steps: Mapping[str, int], source: str
) -> Optional[Comparison]:
    """Returns which adapter is best; None if none has a finite loss.

    Args:
        losses (mapping): Name -> float64 [rows], the sum of the losses of each held-out row.
        counts (array): float64 [rows], how many labels of each row count.
        steps (mapping): Name -> the step at which the adapter was measured.
        source (str): What the rows are called.
    """
    means = {name: float(rows.sum()) for name, rows in losses.items() if np.isfinite(rows).all()}
    if not means:
        return None
    best, *rest = sorted(means, key=lambda name: means[name])
    amounts = {None: losses[best], **{name: losses[name] for name in rest}}
    return Comparison(best, measure("held-out loss", source, True, amounts, counts), dict(steps))
