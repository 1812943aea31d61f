"""The output of ``mindlora doctor``: items of the machine, findings, and a section for each YAML."""

import collections
import dataclasses
from typing import Tuple

from mindlora.core.text import wrapped
from mindlora.run.checks.finding import SEVERITIES, Finding


@dataclasses.dataclass(frozen=True)
class Item:
    """An item that was looked for on this machine.

    ``value`` is its version, "not installed" or "not found"; ``detail`` says where it was found or looked for, or the
    consequences.
    """

    name: str
    value: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class YamlReport:
    """The findings of one YAML, errors first."""

    path: str
    findings: Tuple[Finding, ...]

    def __str__(self):
        counts = collections.Counter(finding.severity for finding in self.findings)
        summary = [f"{counts[name]} {name}{'s' * (counts[name] > 1)}" for name in SEVERITIES if counts[name]]
        return "\n".join([f"{self.path}: {', '.join(summary) or 'no findings'}", *map(_lines, self.findings)])


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """The findings of ``mindlora doctor`` on this machine (versions, CANN, devices, operators, ...) and the YAMLs."""

    machine: Tuple[Item, ...]
    findings: Tuple[Finding, ...]
    yamls: Tuple[YamlReport, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if the machine or a YAML has an error, else 0."""
        findings = [*self.findings, *(finding for report in self.yamls for finding in report.findings)]
        return int(any(finding.severity == "error" for finding in findings))

    def __str__(self):
        name = max(len(item.name) for item in self.machine)
        value = max(len(item.value) for item in self.machine)
        items = [wrapped(f"{item.name:<{name}}  {item.value:<{value}}  ", item.detail) for item in self.machine]
        return "\n".join([*items, *map(_lines, self.findings), *(f"\n{report}" for report in self.yamls)])


def _lines(finding) -> str:
    severity, indent = f"{finding.severity:<9}", " " * 9
    lines = [severity + finding.key] if finding.key else []
    lines.append(wrapped(indent if lines else severity, finding.found))
    if finding.advice:
        lines.append(wrapped(f"{indent}-> ", finding.advice))
    return "\n".join(lines)
