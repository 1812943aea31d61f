"""AdapterHealth in the log: a report as a line, findings as a message, and the cells that they name as a table."""

import statistics
from typing import List, Optional

from mindlora.common.tables import columns, number
from mindlora.common.text import examples
from mindlora.training.health import CellHealth, Finding, HealthReport

_TABLE_ROWS = 16


def summary(report: HealthReport) -> str:
    """Returns a report in one line: medians over the cells, and the number of findings."""
    cells = report.cells.values()
    known = [f"{len(report.cells)} adapters"]
    for name, values in (
        ("change of the weights", [cell.change for cell in cells]),
        ("effective rank", [cell.effective_rank for cell in cells]),
        *((f"update of {part}", [_of(cell, part, "update") for cell in cells]) for part in ("A", "B")),
        ("gradient", [cell.gradient_norm for cell in cells]),
    ):
        found = [value for value in values if value is not None]
        if found:
            known.append(f"{name} {statistics.median(found):.2g}")
    count = len(report.findings)
    return f"{', '.join(known)} (medians); {count or 'no'} finding{'' if count == 1 else 's'}"


def event_message(findings: List[Finding]) -> str:
    """Returns new findings of one rule as one message: where, what was found at the first place, and the advice."""
    first, paths = findings[0], [finding.path for finding in findings if finding.path]
    where = f" at {examples(paths)}" if paths else ""
    at_first = f"At {first.path}: " if len(paths) > 1 else ""
    return f"{first.rule}{where}. {at_first}{first.message} {first.advice}"


def table(report: HealthReport, findings: List[Finding]) -> str:
    """Returns the figures of the cells that ``findings`` name, at most 16 of them, as text."""
    paths = [path for path in dict.fromkeys(finding.path for finding in findings) if path in report.cells]
    titles = ("cell", "|A|", "|B|", "gradient", "update A", "update B", "rank", "change")
    rows = []
    for path in paths[:_TABLE_ROWS]:
        cell = report.cells[path]
        norms, updates = ([_of(cell, part, field) for part in ("A", "B")] for field in ("norm", "update"))
        figures = [*norms, cell.gradient_norm, *updates]
        used = f"{number(cell.effective_rank)} of {cell.rank}"
        rows.append((path, *("-" if value is None else f"{value:.2g}" for value in figures), used, number(cell.change)))
    more = f"\nand {len(paths) - _TABLE_ROWS} more" if len(paths) > _TABLE_ROWS else ""
    return columns(titles, rows) + more


def _of(cell: CellHealth, part: str, field: str) -> Optional[float]:
    return getattr(cell.parts[part], field) if part in cell.parts else None
