"""What the doctor reports: one Finding for each thing it noticed."""

import dataclasses

SEVERITIES = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that the doctor noticed.

    Attributes:
        severity (str): ``error``: the run will fail or not do what it should; ``warning``: that is likely; ``note``:
            good to know.
        key (str): Full path of the key in the YAML, or "".
        found (str): What was found.
        advice (str): What to do, or "" if ``found`` says it.
    """

    severity: str
    key: str
    found: str
    advice: str = ""
