"""The doctor's examination: first this machine, then each YAML, without building its network."""

import contextlib
import importlib.util
import io
import os
import tempfile
from typing import Any, Dict, Iterator, List, Optional, Sequence

from mindlora.cli.doctor.installation import check_import, examine_machine, examine_operators, is_installed
from mindlora.cli.doctor.report import DoctorReport, YamlReport
from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.mindformers_version import mindformers_version, release
from mindlora.core.yaml_file import merged, read_merged, read_yaml
from mindlora.models.label_losses import IN_GRAPH_MODE, IN_PYNATIVE
from mindlora.run.checks.cpu import notes_on_serving
from mindlora.run.checks.data_rows import FirstRows
from mindlora.run.checks.examine import check_contents, check_run
from mindlora.run.checks.files import check_files
from mindlora.run.checks.finding import Finding, error, errors, note, worst_first
from mindlora.run.checks.key_ranges import check_names, check_shape
from mindlora.run.checks.pynative import Version, check_pynative, is_pynative
from mindlora.run.plan.alternatives import data_parallel
from mindlora.run.plan.division import Division
from mindlora.run.plan.pynative import head_of_pynative
from mindlora.run.plan.run import read_run
from mindlora.run.plan.trial import STEPS, Trial, try_rank, with_devices
from mindlora.run.plan.units import gib
from mindlora.run.yaml_run import YamlRun

# Whether a run compiles for its devices: MindSpore's own Ascend backend decides, without an NPU.

_BACKEND = "MindSpore's own Ascend backend, on a stand-in for CANN"
_UNKNOWN = (
    f"What {_BACKEND}, cannot tell: what CANN's kernels compute, how long they take, how much work space they need and "
    "which dtypes they take, and what collectives carry."
)


def try_on_ascend(config: Dict[str, Any], devices: Optional[int] = None) -> Iterator[Finding]:
    """Yields findings on the first steps of a YAML's run, as its first rank and, if that passes, as its last one.

    Args:
        config (dict): The content of a YAML without other faults.
        devices (int, optional): Number of devices, reached by more data-parallel ones. Default: None, those that
            the YAML is for.

    Raises:
        InstallationError: The backend cannot run on this machine.
    """
    try:
        tried = config if devices is None else with_devices(config, devices)
        for rank in sorted({0, Division.of_yaml(YamlRun(tried)).devices - 1}):
            trial = try_rank(tried, rank)
            yield _finding(trial)
            if not trial.passed:
                break
        yield note("", _UNKNOWN)
    except ConfigError as refusal:
        yield error("", f"The run is not tried on {_BACKEND}. {refusal}")


def not_tried(findings: List[Finding]) -> Finding:
    """Returns a note that a YAML with these findings was not tried."""
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


def examine(yaml_paths: Sequence[str] = (), on_ascend: bool = False, devices: Optional[int] = None) -> DoctorReport:
    """Examines this machine, and complete MindFormers YAMLs, without building their networks.

    The report's ``exit_code`` is 1 if the machine or a YAML has an error.

    Args:
        yaml_paths (sequence of str): The YAMLs.
        on_ascend (bool): Whether YAMLs without an error are also compiled by MindSpore's own Ascend backend, which
            takes minutes and needs no NPU. Default: False.
        devices (int, optional): Number of devices for which they are compiled. Default: None, those that a YAML is for.

    Raises:
        InstallationError: ``on_ascend``, and the backend cannot run on this machine.
    """
    items, findings = examine_machine()
    operators, problems = examine_operators() if is_installed("MindSpore") else ([], [])
    yamls = []
    for path in yaml_paths:
        of_yaml = check_yaml(path)
        if on_ascend:
            of_yaml += [not_tried(of_yaml)] if errors(of_yaml) else try_on_ascend(read_yaml(path), devices)
        yamls.append(YamlReport(path, tuple(worst_first(of_yaml))))
    return DoctorReport((*items, *operators), (*findings, *problems), tuple(yamls))


def check_yaml(path: str) -> List[Finding]:
    """Returns faults in a complete MindFormers YAML and facts worth knowing, errors first."""
    try:
        config = read_merged(path)
        if is_pynative(config):
            findings = check_pynative(config, _trainer_version(), _first_rows())
            if not errors(findings):
                findings += note_on_pynative_loss(config)
            return worst_first(findings)
        config = read_yaml(path)
    except ConfigError as refusal:
        return [error("", str(refusal))]
    run = YamlRun(config)
    findings = check_run(run)
    if not list(check_shape(run)):
        if not errors(findings):
            findings += [*notes_on_serving(run), *note_on_loss(config)]
        findings += check_files(run)
        findings += find_further(path, run, right=not errors(findings))
    return worst_first(findings)


def note_on_loss(config: Dict[str, Any]) -> Iterator[Finding]:
    """Yields a note on whether output head and loss take some tokens at a time, if the YAML's run trains."""
    try:
        run = read_run(config)
        if run.yaml.trains:
            advice = "Set parallel.parallel_mode: 0 and full_batch: False: mindlora's train step makes none of them."
            helps = any(read_run(merged(config, keys)).piece for keys in data_parallel(run))
            yield note(IN_GRAPH_MODE, str(run.head), advice if helps else "")
    except LoraError:
        # The network of such a run is unknown; the other checks name the fault.
        return


def note_on_pynative_loss(config: Dict[str, Any]) -> Iterator[Finding]:
    """Yields note_on_loss's note for a YAML of the PyNative Trainer in which mindlora's adapters train."""
    try:
        yield note(IN_PYNATIVE, str(head_of_pynative(config)))
    except LoraError:
        # As above.
        return


def _first_rows() -> Optional[FirstRows]:
    """Returns the function that reads the first rows of a MindRecord, if MindSpore is installed."""
    if importlib.util.find_spec("mindspore") is None:
        return None
    from mindlora.data.mindrecord import first_rows

    return first_rows


def _trainer_version() -> Version:
    """Returns the first two numbers of MindFormers' version if it has the PyNative trainer, else None."""
    version = release(mindformers_version() or "0")
    return version if version >= (2, 0) else None


def find_further(path: str, run: YamlRun, right: bool) -> List[Finding]:
    """Returns findings from MindFormers' registry, if it is installed, and from the contents of base and data.

    The nodes of the YAML must have the right kind; ``right`` says that no error has been found in it.
    """
    if not all(importlib.util.find_spec(package) for package in ("mindspore", "mindformers")) or list(check_import()):
        return [*check_names(run), *check_contents(run)]
    findings: List[Finding] = []
    with _quietly():
        try:
            from mindformers.tools.register import MindFormerConfig

            from mindlora.training.launch import preflight

            read = MindFormerConfig(path)
            findings = preflight.find_by_mindformers(YamlRun(read))
            if right and not errors(findings):
                preflight.fill(read)
            return findings
        except LoraError as refusal:
            return [*findings, error("", str(refusal))]
        except Exception as failure:
            # MindFormers' readers raise exceptions of many kinds, and mindlora-run would fail with the same one.
            problem = f"mindlora-run would fail on this YAML: {type(failure).__name__}: {failure}"
            return list(check_names(run)) or [error("", problem)]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps MindFormers' log, which does not concern the YAML, off the screen and out of the working folder."""
    # Some warnings of MindSpore bypass Python's streams.
    os.environ.setdefault("GLOG_v", "3")
    with tempfile.TemporaryDirectory(prefix="mindlora-doctor-") as folder, contextlib.redirect_stdout(io.StringIO()):
        os.environ.setdefault("LOG_MF_PATH", folder)
        yield
