"""mindlora generate and chat on an engine without a model: see tests/support/scripted_engine.py."""

import contextlib
import io
import types

import numpy as np
import pytest

from mindlora import cli
from tests.support.scripted_engine import HIDDEN, make_engine, write_adapter


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A folder of adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder, "formal", "Dear Sir, ")
    write_adapter(folder, "pirate", "Arr, ")
    write_adapter(folder, "broken", "")
    return str(folder)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """A folder of adapters with score heads, and one without."""
    folder = tmp_path_factory.mktemp("classifiers")
    write_adapter(folder, "pirate", "Arr, ")
    rng = np.random.default_rng(0)
    for name, labels in (("judge", 3), ("reward", 1), ("tagger", 2)):
        score = rng.normal(size=(labels, HIDDEN)).astype(np.float32)
        write_adapter(folder, name, score=score, of_tokens=name == "tagger")
    return str(folder)


@pytest.fixture
def run(adapters, classifiers, capsys, monkeypatch):
    """Returns a function that runs a command line in place of a terminal's user.

    It takes words, what is typed (``typed``; None for a terminal at which nothing is) and the engine's error, and
    returns exit code, stdout and the lines of stderr. Its attribute ``engine`` is the last engine.
    """

    @contextlib.contextmanager
    def loaded_engine(arguments, named, defaults):
        engine = ran.engine = make_engine(arguments.adapters)
        engine.runner.error = ran.error
        for name in named.chosen:
            engine.adapters.memory.load(name)
        try:
            yield engine
        finally:
            if engine.alive:
                engine.stop()

    for module in ("generate", "chat", "classify"):
        monkeypatch.setattr(f"mindlora.cli.{module}.loaded_engine", loaded_engine)

    def ran(*words, typed=None, error=None):
        ran.error = error
        stdin = io.StringIO(typed or "")
        monkeypatch.setattr(stdin, "isatty", lambda: typed is None)
        monkeypatch.setattr("sys.stdin", stdin)
        verb, *rest = words
        folder = classifiers if verb == "classify" else adapters
        code = cli.main([verb, "--config", "run.yaml", "--adapters", folder, *rest])
        printed = capsys.readouterr()
        return types.SimpleNamespace(code=code, out=printed.out, err=printed.err.splitlines())

    return ran
