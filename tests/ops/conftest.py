"""Shared by the tests of the operators: the library, built from the sources, the paths and the instruction sets."""

import pytest

from tests.conftest import in_mode
from tests.support.fewer_cases import each_once
from tests.support.op_paths import ISAS, PATHS
from tests.support.operator_process import EMULATOR

# Tests with one of these run MindSpore, which is there for this machine alone.
_MINDSPORE = {"path", "place", "each_path", "mode", "graph_mode", "pynative_mode"}


def pytest_collection_modifyitems(config, items):
    """With an emulator, leaves the tests that call the kernels themselves, with the one instruction set it has."""
    if not EMULATOR:
        return
    kept, left = [], []
    for item in items:
        fits = "library" in item.fixturenames and _MINDSPORE.isdisjoint(item.fixturenames)
        isa = item.callspec.params.get("isa", "plain") if hasattr(item, "callspec") else "plain"
        (kept if fits and isa == "plain" else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(params=PATHS)
def path(request, monkeypatch, library):
    """Forces each path that is available on this machine."""
    monkeypatch.setenv("MINDLORA_BACKEND", request.param)
    return request.param


@pytest.fixture(params=each_once(PATHS, (0, 1)), ids=lambda pair: f"{pair[0]}-{('graph', 'pynative')[pair[1]]}")
def each_path(request, monkeypatch, library):
    """Forces each path once and each mode once; tests of values and gradients take all of both."""
    path, mode = request.param
    monkeypatch.setenv("MINDLORA_BACKEND", path)
    with in_mode(mode):
        yield path


@pytest.fixture(params=ISAS[:3])
def isa(request, library):
    """Runs a test with each instruction set that this processor has; the last two of ISAS are for some kernels."""
    wanted = ISAS.index(request.param)
    if library.mindlora_set_isa(wanted) != wanted:
        library.mindlora_set_isa(-1)
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.mindlora_set_isa(-1)


@pytest.fixture
def each_isa(library):
    """Returns a function that sets each of several instruction sets that this processor has, and yields its name."""

    def each(names):
        for name in names:
            if library.mindlora_set_isa(ISAS.index(name)) == ISAS.index(name):
                yield name

    yield each
    library.mindlora_set_isa(-1)


@pytest.fixture
def threads(library):
    """Returns a function that sets how many threads a kernel has."""
    before = library.omp_get_max_threads()
    yield library.omp_set_num_threads
    library.omp_set_num_threads(before)
