"""The modules ops/<op>/reference.py, which say in NumPy what an operator computes."""

import functools
import importlib.util
import os
from types import ModuleType

from tests.conftest import ROOT


@functools.lru_cache(maxsize=None)
def reference_of(op: str) -> ModuleType:
    """Returns the module of an operator."""
    spec = importlib.util.spec_from_file_location(f"reference_{op}", os.path.join(ROOT, "ops", op, "reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
