"""Finding: a fault in a YAML or a fact worth knowing, and what to do about it."""

import dataclasses
from typing import Iterable, List

from mindlora.core.errors import ConfigMistakes

SEVERITIES = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A result of a check, at the full path of a key in the YAML, or at "".

    Attributes:
        severity (str): ``error``: the run will fail or not do what it should; ``warning``: it likely will; ``note``:
            good to know.
        advice (str): What to do, or "" if ``found`` says it.
    """

    severity: str
    key: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        """Returns the finding in one line, for errors and logs."""
        where = "" if self.key.rpartition(".")[2] in self.found else f"{self.key}: "
        return f"{where}{self.found} {self.advice}".rstrip()


def error(key: str, found: str, advice: str = "") -> Finding:
    """Returns a finding that ends the run."""
    return Finding("error", key, found, advice)


def warning(key: str, found: str, advice: str = "") -> Finding:
    """Returns a finding that is probably a mistake."""
    return Finding("warning", key, found, advice)


def note(key: str, found: str, advice: str = "") -> Finding:
    """Returns a finding that is good to know."""
    return Finding("note", key, found, advice)


def errors(findings: Iterable[Finding]) -> List[Finding]:
    """Returns the findings that end the run."""
    return [finding for finding in findings if finding.severity == "error"]


def worst_first(findings: Iterable[Finding]) -> List[Finding]:
    """Returns the findings in the order of their severities."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def refuse(findings: Iterable[Finding]) -> None:
    """Raises ConfigMistakes with all errors among the findings, if there are any."""
    mistakes = [str(finding) for finding in errors(findings)]
    if mistakes:
        raise ConfigMistakes(mistakes)
