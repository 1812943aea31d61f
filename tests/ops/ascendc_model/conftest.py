"""Compiles the test kernels, once for each session and in parallel."""

import concurrent.futures
import pathlib

import pytest

from tests.support.ascendc_model import model

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """The compiled test kernels, by the name of their source."""
    folder = tmp_path_factory.mktemp("kernels")
    names = [path.stem for path in HERE.glob("*.cpp")]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Not optimized: compiling takes longer than all runs.
        built = pool.map(lambda name: model.build(HERE / f"{name}.cpp", folder / f"{name}.so", ("-O0",)), names)
        return dict(zip(names, built))


@pytest.fixture
def build():
    """Compiles one source with kernels into a library."""
    return model.build


@pytest.fixture
def refused():
    """The simulator's exception."""
    return model.KernelRefused
