"""mindlora doctor: what stands on this machine, and what is wrong in the YAMLs of a run."""

import dataclasses
import glob
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from typing import List, Optional, Sequence, Tuple

from mindlora import __version__
from mindlora.common.tables import wrapped
from mindlora.doctor.yaml_checks import SEVERITIES, Finding, check_yaml
from mindlora.errors import BackendError

# MindSpore -> MindFormers that were run together; setup.py installs the same pairs.
TESTED_PAIRS = {"2.9.0": "1.9.0", "2.7.2": "1.8.0"}

_ASCEND = "/usr/local/Ascend"
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
# Where releases of CANN keep their version, below the folder of the toolkit.
_CANN_VERSION_FILES = (
    "*/ascend_toolkit_install.info",
    "ascend_toolkit_install.info",
    "version.info",
    "compiler/version.info",
    "runtime/version.info",
    "version.cfg",
)
_VERSION_LINE = re.compile(r"^\s*(?:\w*_)?version\s*=\s*\[?([\w.:+-]+)", re.IGNORECASE | re.MULTILINE)
NOT_FOUND, NOT_INSTALLED = "not found", "not installed"


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing that was looked for on this machine.

    Attributes:
        name (str): What it is.
        value (str): Its version, or "not installed", or "not found".
        detail (str): Where it was found or looked for, or what follows from it.
    """

    name: str
    value: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class YamlReport:
    """What is to say of one YAML.

    Attributes:
        path (str): The YAML.
        findings (tuple of Finding): Errors first.
    """

    path: str
    findings: Tuple[Finding, ...]

    def __str__(self):
        counts = [(severity, sum(finding.severity == severity for finding in self.findings)) for severity in SEVERITIES]
        said = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts if count]
        return "\n".join([f"{self.path}: {', '.join(said) or 'nothing to say'}", *map(_finding, self.findings)])


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """What ``mindlora doctor`` found.

    Attributes:
        machine (tuple of Item): Versions, CANN, driver, devices, and which operators LoRA would use.
        findings (tuple of Finding): What is to say of the machine.
        yamls (tuple of YamlReport): One for each YAML.
    """

    machine: Tuple[Item, ...]
    findings: Tuple[Finding, ...]
    yamls: Tuple[YamlReport, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 where the machine or a YAML has an error, else 0."""
        found = [*self.findings, *(finding for report in self.yamls for finding in report.findings)]
        return int(any(finding.severity == "error" for finding in found))

    def __str__(self):
        name, value = (max(len(getattr(fact, field)) for fact in self.machine) for field in ("name", "value"))
        facts = [wrapped(f"{fact.name:<{name}}  {fact.value:<{value}}  ", fact.detail) for fact in self.machine]
        return "\n".join([*facts, *map(_finding, self.findings), *(f"\n{report}" for report in self.yamls)])


def examine(yaml_paths: Sequence[str] = ()) -> DoctorReport:
    """Looks at this machine, and at YAMLs without building their networks.

    Args:
        yaml_paths (sequence of str): Complete YAMLs of MindFormers. Default: none.

    Returns:
        DoctorReport; its ``exit_code`` is 1 where the machine or a YAML has an error.
    """
    mindspore, mindformers, cann = _package("MindSpore"), _package("MindFormers"), _cann()
    pair, findings = _pair(mindspore.value, mindformers.value)
    operators, problems = _operators(mindspore.value)
    machine = (
        Item("Python", platform.python_version(), sys.executable),
        Item("mindlora", __version__, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        mindspore,
        dataclasses.replace(mindformers, detail=pair or mindformers.detail),
        _package("numpy"),
        _package("safetensors"),
        cann,
        _driver(),
        _devices(),
        Item(
            "LoRADense",
            "composed",
            "plain MindSpore operators on every device: it does not use the fused ones of mindlora.ops yet",
        ),
        *operators,
    )
    reports = []
    for path in yaml_paths:
        reports.append(YamlReport(path, tuple(check_yaml(path))))
    return DoctorReport(machine, tuple(findings + problems), tuple(reports))


def _package(name) -> Item:
    module = name.lower()
    try:
        return Item(name, importlib.metadata.version(module))
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(module)
    if spec is None:
        return Item(name, NOT_INSTALLED)
    return Item(name, "unknown", f"found without a version at {os.path.dirname(spec.origin or '') or spec.name}")


def _pair(mindspore, mindformers) -> Tuple[str, List[Finding]]:
    """Returns in words whether the two versions were tested together, and what to do if not."""
    install = " or ".join(f"MindSpore {first} with MindFormers {second}" for first, second in TESTED_PAIRS.items())
    missing = [
        name for name, found in (("MindSpore", mindspore), ("MindFormers", mindformers)) if found == NOT_INSTALLED
    ]
    if missing:
        return "", [
            Finding(
                "warning",
                "",
                f"{' and '.join(missing)}: not installed. Nothing can be trained here.",
                f"Install {install}.",
            )
        ]
    if TESTED_PAIRS.get(mindspore) == mindformers:
        return f"tested together with MindSpore {mindspore}", []
    return "", [
        Finding(
            "warning",
            "",
            f"MindSpore {mindspore} and MindFormers {mindformers} were not tested together.",
            f"Tested pairs: {install}.",
        )
    ]


def _operators(mindspore) -> Tuple[List[Item], List[Finding]]:
    """Returns which path each operator of mindlora.ops would take and why, or what keeps them from being chosen."""
    if mindspore == NOT_INSTALLED:
        return [], []
    try:
        # Slow, since it imports MindSpore.
        from mindlora.ops import backend_report

        return [Item(choice.op, choice.path, choice.reason) for choice in backend_report().choices], []
    except BackendError as error:
        return [], [Finding("error", "MINDLORA_BACKEND", str(error), "")]
    except ImportError as error:
        return [], [Finding("error", "", f"MindSpore cannot be imported: {error}.", "Install it anew.")]


def _cann() -> Item:
    looked = [
        (f"{variable}={os.environ[variable]}", os.environ[variable])
        for variable in _CANN_VARIABLES
        if os.environ.get(variable)
    ]
    looked += [(path, path) for path in (f"{_ASCEND}/ascend-toolkit/latest", f"{_ASCEND}/latest")]
    for source, folder in looked:
        if os.path.isdir(folder):
            return Item("CANN", _version_below(folder) or "unknown", f"at {source}")
    unset = [variable for variable in _CANN_VARIABLES if not os.environ.get(variable)]
    where = f"no {', no '.join(source for source, _ in looked)}"
    return Item("CANN", NOT_FOUND, f"{' and '.join(unset)} not set, {where}" if unset else where)


def _version_below(folder) -> Optional[str]:
    for pattern in _CANN_VERSION_FILES:
        for path in sorted(glob.glob(os.path.join(folder, pattern))):
            if version := _version_in(path):
                return version
    return None


def _version_in(path) -> Optional[str]:
    """Returns what a file says after ``version=``; of version.cfg's ``[package version:CANN version]`` the second."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = _VERSION_LINE.search(file.read())
    except OSError:
        return None
    return found[1].rpartition(":")[2] if found else None


def _driver() -> Item:
    path = f"{_ASCEND}/driver/version.info"
    tool = shutil.which("npu-smi") or shutil.which("npu-smi", path="/usr/local/sbin:/usr/local/bin")
    smi = f"npu-smi at {tool}" if tool else "no npu-smi"
    if os.path.exists(path):
        return Item("driver", _version_in(path) or "unknown", f"{path}, {smi}")
    return Item("driver", NOT_FOUND, f"no {path}, {smi}")


def _devices() -> Item:
    count = sum(bool(re.fullmatch(r"/dev/davinci\d+", path)) for path in glob.glob("/dev/davinci*"))
    return Item("NPUs", str(count) if count else NOT_FOUND, "/dev/davinci*" if count else "no /dev/davinci0")


def _finding(finding) -> str:
    severity, indent = f"{finding.severity:<9}", " " * 9
    lines = [severity + finding.key] if finding.key else []
    lines.append(wrapped(indent if lines else severity, finding.found))
    if finding.advice:
        lines.append(wrapped(f"{indent}-> ", finding.advice))
    return "\n".join(lines)
