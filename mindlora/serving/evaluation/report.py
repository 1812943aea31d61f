"""EvalReport: everything that was measured of a base and its adapters, and what it tells, in a sentence."""

import dataclasses
from typing import Any, Dict, List, Tuple

from mindlora.core.tables import columns, number, wrapped
from mindlora.serving.evaluation import forgetting
from mindlora.serving.evaluation.statistics import BETTER, LEAST_EXAMPLES, NOT_TOLD_APART, WORSE, Estimate, Measure


@dataclasses.dataclass(frozen=True)
class EvalReport:
    """What ``mindlora eval`` has found.

    Attributes:
        model (str): What the base is called.
        measures (tuple of Measure): In the order in which they were asked for.
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
        """Returns {"title", "rows"} for each measure: rows of texts, the first of which names the columns."""
        return [{"title": title(found), "rows": _rows(found)} for found in self.measures]


def title(found: Measure) -> str:
    """Returns what was measured on what, in words."""
    if found.name == forgetting.NAME:
        return f"KL(base || adapter), nats per token, on {found.examples} {found.source}"
    return f"{found.name} of {found.source} ({found.examples} examples)"


def _rows(found: Measure) -> List[List[str]]:
    titles = ["model", "value", "95 % interval"]
    rows = [[name, number(value.value), interval(value)] for name, value in found.values.items()]
    if found.name == forgetting.NAME:
        # The base's own value is 0.
        return [titles, *rows[1:]]
    if found.differences:
        titles += ["minus base", "95 % interval", ""]
        rows[0] += ["", "", ""]
        for row, (name, difference) in zip(rows[1:], found.differences.items()):
            row += [number(difference.value), interval(difference), found.verdicts[name]]
    return [titles, *rows]


def interval(value: Estimate) -> str:
    """Returns the interval of a value, as text."""
    return "-" if value.low is None else f"{number(value.low)} to {number(value.high)}"


def _sentence(adapter: str, measures: Tuple[Measure, ...]) -> str:
    """Returns whether an adapter is better than its base, worse, or not told apart, and how much of it has moved."""
    parts: List[str] = []
    judged = [found for found in measures if found.name != forgetting.NAME]
    for verdict in (BETTER, WORSE):
        parts += [
            f"{verdict} in {found.name} of {found.source} ({number(found.values['base'].value)} to "
            f"{number(found.values[adapter].value)})"
            for found in judged
            if found.verdicts[adapter] == verdict
        ]
    parts += [_not_told_apart(found) for found in judged if found.verdicts[adapter] == NOT_TOLD_APART]
    moved = [
        f"{number(found.values[adapter].value)} nats per token away from what the base says itself"
        for found in measures
        if found.name == forgetting.NAME
    ]
    return f"{adapter} against the base: {'; '.join(parts + moved)}."


def _not_told_apart(found: Measure) -> str:
    few = "" if found.examples >= LEAST_EXAMPLES else f", which are fewer than {LEAST_EXAMPLES}"
    return f"{NOT_TOLD_APART} by {found.examples} examples in {found.name} of {found.source}{few}"
