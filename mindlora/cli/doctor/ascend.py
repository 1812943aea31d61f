"""Does a run compile for its devices? MindSpore's own Ascend backend tells, without an NPU."""

from typing import Any, Dict, Iterator, List, Optional

from mindlora.core.errors import ConfigError
from mindlora.run.checks.finding import Finding, error, note
from mindlora.run.plan.division import Division
from mindlora.run.plan.trial import STEPS, Trial, try_rank, with_devices
from mindlora.run.plan.units import gib

_BACKEND = "MindSpore's own Ascend backend, on a stand-in for CANN"
_UNKNOWN = (
    f"What {_BACKEND}, cannot tell: what CANN's kernels compute, how long they take, how much work space they need and "
    "which dtypes they take, and what collectives carry."
)


def try_on_ascend(config: Dict[str, Any], devices: Optional[int] = None) -> Iterator[Finding]:
    """Yields what comes of the first steps of a YAML's run, as its first rank and, if that passes, as its last one.

    Args:
        config (dict): The content of a YAML in which nothing else is wrong.
        devices (int, optional): On how many devices, with as many more data-parallel ones. Default: None, those that
            the YAML is for.

    Raises:
        InstallationError: The backend cannot run on this machine.
    """
    try:
        tried = config if devices is None else with_devices(config, devices)
        for rank in sorted({0, Division.of_yaml(tried).devices - 1}):
            trial = try_rank(tried, rank)
            yield _finding(trial)
            if not trial.passed:
                break
        yield note("", _UNKNOWN)
    except ConfigError as refusal:
        yield error("", f"The run is not tried on {_BACKEND}. {refusal}")


def not_tried(findings: List[Finding]) -> Finding:
    """Returns the note that a YAML with these findings was not tried."""
    count = sum(finding.severity == "error" for finding in findings)
    return note("", f"The run is not tried on {_BACKEND}: correct the error{'s' * (count > 1)} first.")


def _finding(trial: Trial) -> Finding:
    who = f"{_BACKEND}, as rank {trial.rank} of {trial.devices}"
    if not trial.passed:
        return error("", f"{who}: the run ended after {trial.steps} of {STEPS} steps. {trial.error}")
    peak = ""
    if trial.used is not None and trial.actual is not None:
        peak = f" Its planner takes {gib(trial.used)} GiB, and {gib(trial.actual)} GiB with fragments."
    rows = "made-up rows" if trial.made_up else "rows of the data"
    done = f"the run compiles and reaches its second step, on {rows}, in {trial.seconds:.0f} s"
    return note("", f"{who}: {done}.{peak}")
