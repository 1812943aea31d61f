"""The installation on this machine: packages, CANN, driver, NPUs."""

import contextlib
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
from mindlora.core.errors import BackendError, ConfigError, InstallationError
from mindlora.core.mindformers_version import cannot_be_imported, release, require_mindformers
from mindlora.run.checks.finding import Finding

# The operators that LoRA would use on this machine.

# LoRADense's use of the operators of each path (see mindlora.network.cells.dense).
_LORA_DENSE = {
    "ascend": "fused operators of mindlora.ops, in training and in evaluation",
    "cpu": (
        "fused operators of mindlora.ops in evaluation; in training plain MindSpore operators, which measured faster"
    ),
    "composed": "plain MindSpore operators, in training and in evaluation",
}


def examine_operators() -> Tuple[List[Item], List[Finding]]:
    """Returns the path of LoRADense and of each operator of mindlora.ops in graph mode, or why none can be chosen.

    MindSpore must be installed.
    """
    try:
        # Imports MindSpore, which takes seconds.
        from mindlora.ops import backend_report, measured

        adopted = measured.read_adopted()
        with _graph_mode():
            choices = backend_report().choices
    except BackendError as error:
        return [], [Finding("error", "MINDLORA_BACKEND", str(error))]
    except ConfigError as error:
        return [], [Finding("error", "", str(error))]
    except ImportError as error:
        return [], [Finding("error", "", f"MindSpore cannot be imported: {error}.", "Reinstall it.")]
    (path,) = (choice.path for choice in choices if choice.op == "lora_delta")
    items = [Item(choice.op, choice.path, choice.reason) for choice in choices]
    measurements = [] if adopted is None else [_describe(adopted, measured.measured() is not None)]
    return [Item("LoRADense", path, _LORA_DENSE[path]), *items, *measurements], []


def _describe(adopted, used) -> Item:
    """Returns the item for adopted choices."""
    from mindlora.ops.measured import FILE

    use = "on an NPU" if used else f"not used: they are of mindlora {adopted.mindlora}"
    return Item("measured", adopted.machine, f"{adopted}; {use} ({FILE}; remove it to have mindlora choose)")


def adopt_choices(path: str) -> None:
    """Stores the measurements of scripts/verify_npu.sh for this installation; ``path`` is its report.

    Raises InstallationError without MindSpore, and ConfigError if it is not such a report.
    """
    try:
        from mindlora.ops import measured
    except ImportError as error:
        raise InstallationError(f"--adopt needs MindSpore, which cannot be imported: {error}. Install it.") from error
    measured.adopt(path)


@contextlib.contextmanager
def _graph_mode() -> Iterator[None]:
    """Switches to graph mode within the context: MindFormers trains in it, but it is not MindSpore's default."""
    import mindspore as ms

    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=before)


# Versions of MindSpore and MindFormers that were tested together, the default first. setup.py installs those that pip
# resolves, scripts/environment.sh the others.
TESTED_PAIRS = (("2.9.0", "1.9.0"), ("2.7.2", "1.8.0"), ("2.10.0", "2.1.0"), ("2.10.0", "2.0.0"))

_ASCEND = "/usr/local/Ascend"
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
# Files with the version in the various releases of CANN, below the folder of the toolkit.
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
    """Returns the items of this machine, and faults of its MindSpore and MindFormers."""
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
    """Yields a finding if the installed MindFormers cannot be imported."""
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
    """Yields the package with which MindFormers 2 shards PyNative training, and the consequences if it is missing."""
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
