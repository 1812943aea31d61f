"""What is installed on this machine: packages, CANN, driver, NPUs."""

import glob
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from typing import Iterator, List, Optional, Tuple

from mindlora import __version__
from mindlora.cli.doctor.report import Item
from mindlora.core.errors import InstallationError
from mindlora.core.mindformers_version import cannot_be_imported, release, require_mindformers
from mindlora.run.checks.finding import Finding

# Versions of MindSpore and MindFormers that were run together, the default first. setup.py installs those that pip
# resolves, scripts/environment.sh the others.
TESTED_PAIRS = (("2.9.0", "1.9.0"), ("2.7.2", "1.8.0"), ("2.10.0", "2.1.0"), ("2.10.0", "2.0.0"))

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
    """Returns the items of this machine, and what is wrong with its MindSpore and MindFormers."""
    mindspore, mindformers = _package("MindSpore"), _package("MindFormers")
    findings = [*_check_pair(mindspore.value, mindformers.value), *check_import()]
    if (mindspore.value, mindformers.value) in TESTED_PAIRS:
        mindformers = Item("MindFormers", mindformers.value, f"tested together with MindSpore {mindspore.value}")
    items = [
        Item("Python", platform.python_version(), sys.executable),
        Item("mindlora", __version__, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))),
        mindspore,
        mindformers,
        *_hyper_parallel(mindformers.value),
        _package("numpy"),
        _package("safetensors"),
        _cann(),
        _driver(),
        _npus(),
    ]
    return items, findings


def is_installed(name: str) -> bool:
    """Returns whether a package is installed, without importing it."""
    return _package(name).value != NOT_INSTALLED


def check_import() -> Iterator[Finding]:
    """Yields a finding if a MindFormers is installed that cannot be imported here."""
    if is_installed("MindFormers"):
        try:
            require_mindformers()
        except InstallationError as refusal:
            yield Finding("error", "", str(refusal))


def _package(name) -> Item:
    module = name.lower()
    try:
        return Item(name, importlib.metadata.version(module))
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(module)
    if spec is None:
        return Item(name, NOT_INSTALLED)
    return Item(name, "unknown", f"at {os.path.dirname(spec.origin or '') or spec.name}, without version metadata")


def _check_pair(mindspore, mindformers) -> Iterator[Finding]:
    """Yields a finding unless the two versions were tested together."""
    pairs = " or ".join(f"MindSpore {first} with MindFormers {second}" for first, second in TESTED_PAIRS)
    versions = {"MindSpore": mindspore, "MindFormers": mindformers}
    missing = [name for name, version in versions.items() if version == NOT_INSTALLED]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        text = f"{' and '.join(missing)} {verb} not installed, so nothing can be trained here."
        yield Finding("warning", "", text, f"Install {pairs}.")
    elif (mindspore, mindformers) not in TESTED_PAIRS:
        text = f"MindSpore {mindspore} and MindFormers {mindformers} were not tested together."
        yield Finding("warning", "", text, f"Tested pairs: {pairs}.")


def _hyper_parallel(mindformers) -> Iterator[Item]:
    """Yields the package with which MindFormers 2 shards PyNative training, and what follows if it is missing."""
    if not mindformers[:1].isdigit() or release(mindformers) < (2, 0):
        return
    item = _package("hyper_parallel")
    if item.value != NOT_INSTALLED:
        yield Item(item.name, item.value, item.detail or "MindFormers' PyNative Trainer shards with it")
    elif cannot_be_imported(mindformers):
        yield Item(item.name, item.value, f"MindFormers {mindformers} cannot be imported without it")
    else:
        detail = (
            "training in graph mode does not need it, and MindFormers gives three warnings when it is imported; "
            "MindFormers' PyNative Trainer needs it"
        )
        yield Item(item.name, item.value, detail)


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
            version_line = _VERSION_LINE.search(file.read())
    except OSError:
        return None
    return version_line[1].rpartition(":")[2] if version_line else None


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
