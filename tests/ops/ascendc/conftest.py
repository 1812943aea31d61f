"""The Ascend C kernels in the simulator (not CANN and not an NPU), against the oracles in NumPy."""

import importlib.util
import pathlib

import pytest

from tests.support import cann_stand_in

OPS = pathlib.Path(__file__).resolve().parents[3] / "ops"


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference():
    """Returns the module reference.py of an operator."""
    return lambda op: _load(f"{op}_reference", OPS / op / "reference.py")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory):
    """The folders of a made-up CANN, "cann", and of an operator package with the real host sides, "package"."""
    return cann_stand_in.make(tmp_path_factory.mktemp("stand_in"))
