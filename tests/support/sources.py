"""The modules of mindlora as text and as syntax trees, read once for all tests that look at them."""

import ast
import functools
import pathlib
from typing import NamedTuple, Tuple

from tests.conftest import ROOT


class Module(NamedTuple):
    """A module: its path below mindlora/, its source and its tree."""

    path: str
    source: str
    tree: ast.Module


@functools.lru_cache(maxsize=None)
def modules() -> Tuple[Module, ...]:
    """Returns all modules of the package."""
    package = pathlib.Path(ROOT, "mindlora")
    found = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(package).as_posix(), source, ast.parse(source)))
    return tuple(found)
