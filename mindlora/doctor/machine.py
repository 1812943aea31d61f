"""What is installed on this machine: packages, CANN, driver, NPUs."""

import glob
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from typing import List, Optional, Tuple

from mindlora import __version__
from mindlora.checks.finding import Finding
from mindlora.doctor.report import Item

# MindSpore version -> MindFormers version that it was tested with; setup.py installs the same pairs.
TESTED_PAIRS = {"2.9.0": "1.9.0", "2.7.2": "1.8.0"}

_ASCEND = "/usr/local/Ascend"
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
# Where the various releases of CANN keep their version, below the folder of the toolkit.
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


def examine_machine() -> Tuple[List[Item], List[Finding]]:
    """Returns the items of this machine, and a finding if MindSpore and MindFormers are not a tested pair."""
    mindspore, mindformers = _package("MindSpore"), _package("MindFormers")
    finding = _check_pair(mindspore.value, mindformers.value)
    if finding is None:
        mindformers = Item("MindFormers", mindformers.value, f"tested together with MindSpore {mindspore.value}")
    items = [
        Item("Python", platform.python_version(), sys.executable),
        Item("mindlora", __version__, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        mindspore,
        mindformers,
        _package("numpy"),
        _package("safetensors"),
        _cann(),
        _driver(),
        _npus(),
    ]
    return items, [] if finding is None else [finding]


def is_installed(name: str) -> bool:
    """Returns whether a package is installed, without importing it."""
    return _package(name).value != NOT_INSTALLED


def _package(name) -> Item:
    module = name.lower()
    try:
        return Item(name, importlib.metadata.version(module))
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(module)
    if spec is None:
        return Item(name, NOT_INSTALLED)
    return Item(name, "unknown", f"at {os.path.dirname(spec.origin or '') or spec.name}, without version metadata")


def _check_pair(mindspore, mindformers) -> Optional[Finding]:
    """Returns a finding unless the two versions were tested together."""
    pairs = " or ".join(f"MindSpore {first} with MindFormers {second}" for first, second in TESTED_PAIRS.items())
    found = {"MindSpore": mindspore, "MindFormers": mindformers}
    missing = [name for name, version in found.items() if version == NOT_INSTALLED]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        text = f"{' and '.join(missing)} {verb} not installed, so nothing can be trained here."
        return Finding("warning", "", text, f"Install {pairs}.")
    if TESTED_PAIRS.get(mindspore) == mindformers:
        return None
    text = f"MindSpore {mindspore} and MindFormers {mindformers} were not tested together."
    return Finding("warning", "", text, f"Tested pairs: {pairs}.")


def _cann() -> Item:
    candidates = [
        (f"{variable}={os.environ[variable]}", os.environ[variable])
        for variable in _CANN_VARIABLES
        if os.environ.get(variable)
    ]
    candidates += [(path, path) for path in (f"{_ASCEND}/ascend-toolkit/latest", f"{_ASCEND}/latest")]
    for source, folder in candidates:
        if os.path.isdir(folder):
            return Item("CANN", _version_below(folder) or "unknown", f"at {source}")
    unset = [variable for variable in _CANN_VARIABLES if not os.environ.get(variable)]
    where = f"no {', no '.join(source for source, _ in candidates)}"
    return Item("CANN", NOT_FOUND, f"{' and '.join(unset)} not set, {where}" if unset else where)


def _version_below(folder) -> Optional[str]:
    for pattern in _CANN_VERSION_FILES:
        for path in sorted(glob.glob(os.path.join(folder, pattern))):
            if version := _version_in(path):
                return version
    return None


def _version_in(path) -> Optional[str]:
    """Returns the text after ``version=``; of version.cfg's ``[package version:CANN version]``, the second part."""
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


def _npus() -> Item:
    count = sum(bool(re.fullmatch(r"/dev/davinci\d+", path)) for path in glob.glob("/dev/davinci*"))
    return Item("NPUs", str(count) if count else NOT_FOUND, "/dev/davinci*" if count else "no /dev/davinci0")
