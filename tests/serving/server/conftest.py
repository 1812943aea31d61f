"""An engine without a model for the tests of a file, with a folder of adapters."""

import pytest

from tests.support.scripted_engine import make_engine, started, write_adapter


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder, "formal", "Dear Sir, ")
    write_adapter(folder, "pirate", "Arr, ")
    write_adapter(folder, "broken", "")
    return folder


@pytest.fixture(scope="module")
def running(adapters):
    with started(make_engine(str(adapters))) as engine:
        yield engine


@pytest.fixture
def engine(running):
    """Each test gets it idle, and leaves it so."""
    yield running
    running.runner.delay, running.runner.error = 0.0, None
    running.runner.going.set()
