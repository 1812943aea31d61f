"""Shared by the tests of the operators: the library, built from the sources, the paths and the instruction sets."""

import pytest

from tests.support.op_paths import PATHS


@pytest.fixture(params=PATHS)
def path(request, monkeypatch, library):
    """Forces each path that is available on this machine."""
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
