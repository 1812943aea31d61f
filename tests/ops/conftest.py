"""Shared by the tests of the operators: the library, built from the sources, the paths and the instruction sets."""
import importlib.util
import os

import pytest

from tests.conftest import ROOT
from tests.ops.paths import PATHS


@pytest.fixture(params=PATHS)
def path(request, monkeypatch, library):
    """Forces each path that can be had on this machine."""
    monkeypatch.setenv("MINDLORA_BACKEND", request.param)
    return request.param


@pytest.fixture(params=["plain", "avx2", "avx512"])
def isa(request, library):
    """Runs a test with each instruction set that this processor has."""
    wanted = ["plain", "avx2", "avx512"].index(request.param)
    if library.mindlora_set_isa(wanted) != wanted:
        library.mindlora_set_isa(-1)
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.mindlora_set_isa(-1)


@pytest.fixture
def reference(request, library):
    """The reference.py of the operator that the test file is named after, or that it calls OPERATOR."""
    op = getattr(request.module, "OPERATOR", request.module.__name__.rpartition("test_")[2])
    spec = importlib.util.spec_from_file_location(f"reference_{op}", os.path.join(ROOT, "ops", op, "reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
