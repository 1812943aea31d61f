"""An environment for Python processes that find what `pip install .` brings, and not what mindlora's extras add."""

import functools
import importlib.metadata
import os
import re
from typing import Dict, Iterator, Set

import pytest
from packaging.requirements import Requirement

# Python imports it at each start, from the first folder of PYTHONPATH that has it.
HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def required(distribution: str, extras: Set[str]) -> Iterator[str]:
    """Yields the names of what a distribution that is installed requires with some extras."""
    for line in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", *extras}):
            yield _normalized(requirement.name)


def brought(extras: Set[str]) -> Set[str]:
    """Returns the distributions that mindlora with some extras brings, as far as they are installed."""
    installed = {_normalized(name) for names in _tops().values() for name in names}
    found: Set[str] = set()
    waiting = set(required("mindlora", extras))
    while waiting:
        name = waiting.pop()
        if name in installed and name not in found:
            found.add(name)
            waiting |= set(required(name, set()))
    return found


def hidden() -> Set[str]:
    """Returns the top-level modules that only mindlora's extras bring, and the folder of the tests."""
    plain = brought(set())
    extra = brought({"test", "data", "serve", "plot", "report"}) - plain
    owners = {top: {_normalized(name) for name in names} for top, names in _tops().items()}
    return {"tests", *(top for top, names in owners.items() if names <= extra)}


def bare_environment(folder: str) -> Dict[str, str]:
    """Returns the variables of such a process; ``folder`` is empty and stays. Skips the test without mindlora."""
    if "mindlora" not in {_normalized(name) for names in _tops().values() for name in names}:
        pytest.skip("mindlora is not installed in this environment, so what it requires is not known")
    with open(os.path.join(folder, "sitecustomize.py"), "w", encoding="utf-8") as file:
        file.write(HIDE.format(hidden=hidden()))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND", "MINDLORA", "PYTEST"))}
    return {**kept, "PYTHONPATH": folder}


@functools.lru_cache(maxsize=None)
def _tops():
    return importlib.metadata.packages_distributions()


def _normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()
