"""Compiles the test kernels, once for each session and in parallel."""

import concurrent.futures
import importlib.util
import pathlib

import pytest

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "ops" / "ascendc_model" / "model.py"

SPEC = importlib.util.spec_from_file_location("ascendc_model", MODEL)
ascendc_model = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ascendc_model)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """The compiled test kernels, by the name of their source."""
    folder = tmp_path_factory.mktemp("kernels")
    names = [path.stem for path in HERE.glob("*.cpp")]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Not optimized: compiling takes longer than all runs.
        built = pool.map(lambda name: ascendc_model.build(HERE / f"{name}.cpp", folder / f"{name}.so", ("-O0",)), names)
        return dict(zip(names, built))


@pytest.fixture
def build():
    """Compiles one source with kernels into a library."""
    return ascendc_model.build


@pytest.fixture
def refused():
    """The simulator's exception."""
    return ascendc_model.KernelRefused
