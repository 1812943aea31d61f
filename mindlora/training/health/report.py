"""What AdapterHealth reports, parts, cells and findings, and its text in the log."""

import dataclasses
import math
import statistics
from typing import Any, Dict, List, Optional

from mindlora.core.text import columns, examples, number

_TABLE_ROWS = 16


@dataclasses.dataclass(frozen=True)
class PartHealth:
    """One tensor of a cell's adapter: A, B, a magnitude of DoRA or a vector of VeRA.

    Attributes:
        size (int): Number of elements.
        norm (float): Frobenius norm.
        zeros (float): Share of elements that are exactly zero.
        gradient_norm (float or None): Norm of its gradient in the last step, before clipping; None if it is not known.
        update (float or None): |P_t - P_(t-1)| / |P_(t-1)| of the last step; None if it does not train, was zero or was
            not seen before the step, or if the step was skipped.
    """

    size: int
    norm: float
    zeros: float
    gradient_norm: Optional[float] = None
    update: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class CellHealth:
    """The adapter of one cell.

    D is what the adapter has changed in the weight: scale B A, or scale (B A - B0 A0) where the initial pair was
    subtracted from the base (PiSSA, OLoRA). The last four are None for VeRA and for convolutions with groups, and the
    effective rank also where D is zero.

    Attributes:
        rank (int): Rank r; 2 r where an initial pair was subtracted, as D can have that rank then.
        zero_part (str): The part that is zero until it trains: usually "B".
        parts (dict): Name of the part -> PartHealth.
        effective_rank (float or None): exp(entropy of the singular values of D over their sum), from 1 to ``rank``.
        change_norm (float or None): |D|.
        change (float or None): |D| / |W|; None also if |W| is not known.
        singular_values (list of float or None): Those of D, the largest first, to four digits.
    """

    rank: int
    zero_part: str
    parts: Dict[str, PartHealth]
    effective_rank: Optional[float] = None
    change_norm: Optional[float] = None
    change: Optional[float] = None
    singular_values: Optional[List[float]] = None

    @property
    def gradient_norm(self) -> Optional[float]:
        """The norm of the gradients of all parts together, or None if none is known."""
        norms = [part.gradient_norm for part in self.parts.values() if part.gradient_norm is not None]
        return math.hypot(*norms) if norms else None

    @property
    def gradient_size(self) -> int:
        """The number of elements of the parts whose gradients are known."""
        return sum(part.size for part in self.parts.values() if part.gradient_norm is not None)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a rule found at one cell, one layer, or (with an empty path) in the whole run.

    Attributes:
        rule (str): Name of the rule, as in docs/health.md.
        path (str): Path of the cell or of the layer.
        message (str): What is wrong, with its figures.
        advice (str): What to change.
    """

    rule: str
    path: str
    message: str
    advice: str


@dataclasses.dataclass(frozen=True)
class HealthReport:
    """All adapters after one step.

    Attributes:
        step (int): The step.
        cells (dict): Path of the cell -> CellHealth, in the order of the network.
        findings (list of Finding): Every rule that holds at this step, also those that held before.
    """

    step: int
    cells: Dict[str, CellHealth]
    findings: List[Finding] = dataclasses.field(default_factory=list)

    def to_json(self) -> Dict[str, Any]:
        """Returns the report as JSON values; a number that is not finite becomes None."""
        return _json_value(dataclasses.asdict(self))


def summary(report: HealthReport) -> str:
    """Returns a report in one line: medians over the cells, and the number of findings."""
    cells = report.cells.values()
    figures = {
        "change of the weights": [cell.change for cell in cells],
        "effective rank": [cell.effective_rank for cell in cells],
        "update of A": [_of(cell, "A", "update") for cell in cells],
        "update of B": [_of(cell, "B", "update") for cell in cells],
        "gradient": [cell.gradient_norm for cell in cells],
    }
    texts = [f"{len(report.cells)} adapters"]
    for name, values in figures.items():
        numbers = [value for value in values if value is not None]
        if numbers:
            texts.append(f"{name} {statistics.median(numbers):.2g}")
    count = len(report.findings)
    return f"{', '.join(texts)} (medians); {count or 'no'} finding{'' if count == 1 else 's'}"


def event_message(findings: List[Finding]) -> str:
    """Returns new findings of one rule as one message: where, what was found at the first place, and the advice."""
    first = findings[0]
    paths = [finding.path for finding in findings if finding.path]
    where = f" at {examples(paths)}" if paths else ""
    at_first = f"At {first.path}: " if len(paths) > 1 else ""
    return f"{first.rule}{where}. {at_first}{first.message} {first.advice}"


def table(report: HealthReport, findings: List[Finding]) -> str:
    """Returns the figures of the cells that ``findings`` name, at most 16 of them, as text."""
    named = dict.fromkeys(finding.path for finding in findings)
    paths = [path for path in named if path in report.cells]
    titles = ("cell", "|A|", "|B|", "gradient", "update A", "update B", "rank", "change")
    rows = []
    for path in paths[:_TABLE_ROWS]:
        cell = report.cells[path]
        norms = [_of(cell, part, "norm") for part in ("A", "B")]
        updates = [_of(cell, part, "update") for part in ("A", "B")]
        figures = [*norms, cell.gradient_norm, *updates]
        used = f"{number(cell.effective_rank)} of {cell.rank}"
        rows.append((path, *("-" if value is None else f"{value:.2g}" for value in figures), used, number(cell.change)))
    more = f"\nand {len(paths) - _TABLE_ROWS} more" if len(paths) > _TABLE_ROWS else ""
    return columns(titles, rows) + more


def _of(cell: CellHealth, part: str, field: str) -> Optional[float]:
    return getattr(cell.parts[part], field) if part in cell.parts else None


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
