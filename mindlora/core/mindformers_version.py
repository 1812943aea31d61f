"""Checks, before importing it, whether the installed MindFormers can be imported and is new enough."""

import importlib.metadata
import importlib.util
import re
from typing import Optional, Tuple

from mindlora.core.errors import InstallationError

OLDEST = "1.8"


def require_mindformers(oldest: str = OLDEST) -> None:
    """Raises InstallationError unless MindFormers is installed, not older than ``oldest``, and can be imported.

    Before a module imports what the oldest MindFormers lacks, it calls this with the version that brought it, or the
    __init__.py of its package does. tests/training/launch/test_mindformers_imports.py holds all modules to that.
    """
    version = mindformers_version()
    if version is None:
        if importlib.util.find_spec("mindformers") is not None:
            return  # It runs from its source folder, and has a version only once it is imported.
        raise InstallationError("MindFormers is not installed. Install a pair that docs/installation.md names.")
    if release(version) < release(oldest):
        raise InstallationError(
            f"MindFormers is {version}, but this needs {oldest} or newer. docs/installation.md lists the versions of "
            "MindSpore and MindFormers that were tested together: install such a pair."
        )
    if cannot_be_imported(version):
        raise InstallationError(
            f"MindFormers {version} cannot be imported, because it needs hyper_parallel, which is not installed. "
            "Install hyper-parallel 1.0 from its source (no registry has it), or a MindFormers that does without: "
            "2.1.0 beside MindSpore 2.10.0, or 1.9.0 beside 2.9.0."
        )


def mindformers_version() -> Optional[str]:
    """Returns the version in the metadata of MindFormers, or None if it has none."""
    try:
        return importlib.metadata.version("mindformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def cannot_be_imported(version: str) -> bool:
    """Returns whether a MindFormers fails at import: 2.0 imports hyper_parallel without a guard."""
    return release(version) == (2, 0) and importlib.util.find_spec("hyper_parallel") is None


def release(version: str) -> Tuple[int, int]:
    """Returns the first two numbers of a version: MindFormers' interfaces change only with these."""
    numbers = re.findall(r"\d+", f"{version}.0")
    return int(numbers[0]), int(numbers[1])
