"""What is said of a MindFormers that cannot be imported, before it is."""

import importlib.metadata
import importlib.util
import sys

import pytest

from mindlora import cli
from mindlora.core.errors import InstallationError
from mindlora.core.mindformers_version import cannot_be_imported, release, require_mindformers
from mindlora.training.launch import launcher
from tests.support.runs import LORA_YAML


def install(monkeypatch, version, *packages):
    """As if MindFormers were installed with this version in its metadata, and these packages could be imported."""

    def version_of(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)


@pytest.mark.parametrize(
    "version, packages, oldest",
    [
        ("1.8.0", ["mindformers"], "1.8"),
        ("1.10.0", ["mindformers"], "1.9"),
        ("2.0.0", ["mindformers", "hyper_parallel"], "1.8"),
        ("2.0.1", ["mindformers", "hyper_parallel"], "2.0"),
        ("2.1.0", ["mindformers"], "2.0"),
        (None, ["mindformers"], "1.8"),
    ],
)
def test_a_mindformers_that_can_be_imported(monkeypatch, version, packages, oldest):
    install(monkeypatch, version, *packages)
    require_mindformers(oldest)


@pytest.mark.parametrize(
    "version, oldest, message",
    [
        (None, "1.8", "MindFormers is not installed"),
        ("1.7.0", "1.8", "MindFormers is 1.7.0, but this needs 1.8 or newer"),
        ("1.9.0", "2.0", "MindFormers is 1.9.0, but this needs 2.0 or newer"),
        ("2.0.0", "1.8", "MindFormers 2.0.0 cannot be imported, because it needs hyper_parallel"),
    ],
)
def test_a_mindformers_that_cannot(monkeypatch, version, oldest, message):
    install(monkeypatch, version, *(["mindformers"] if version else []))
    with pytest.raises(InstallationError, match=message):
        require_mindformers(oldest)


def test_commands_say_so_before_they_import_it(monkeypatch, capsys, tmp_path):
    install(monkeypatch, "2.0.0", "mindformers")
    # As in a process in which no other test has imported it.
    monkeypatch.delitem(sys.modules, "mindformers", raising=False)
    assert launcher.main(["--config", LORA_YAML]) == 1
    (tmp_path / "t.model").write_bytes(b"x")
    (tmp_path / "a.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    data = ["data", "alpaca", "--input", "a.jsonl", "--output", "a.mindrecord", "--tokenizer", "t.model"]
    assert cli.main([*data, "--seq-length", "8"]) == 1
    assert cli.main(["generate", "--config", LORA_YAML, "--base", "--prompt", "a"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if ": error:" in line]
    assert len(lines) == 3 and all("MindFormers 2.0.0 cannot be imported" in line for line in lines)


def test_release():
    assert [release(version) for version in ("2.1.0", "1.10.0rc1", "2")] == [(2, 1), (1, 10), (2, 0)]
    assert not cannot_be_imported("2.1.0")
