"""A damaged adapter is refused with one of our errors, of the right class, that says what is wrong and nothing more."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support import try_damaged_adapters
from tests.support.damaged_adapters import CASES


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Returns what happened in each case, by name."""
    root = tmp_path_factory.mktemp("damaged")
    run = subprocess.run(
        [sys.executable, try_damaged_adapters.__file__, str(root)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    # A program in a .bin would have written a file beside the cases.
    assert not (root / "marker").exists()
    return {found["name"]: found for found in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_adapter(tried, name):
    _, error, words, refused_by_read = CASES[name]
    found = tried[name]
    results = [found["loads"][0]] + ([found["read"], found["loads"][1]] if refused_by_read else [])
    for result in results:
        assert result is not None, "it was accepted"
        kind, ours, message = result
        assert ours and kind == error, result
        assert all(word in message for word in words), message
        # It names the file or tensor without quoting a megabyte of it, and reading and loading say the same.
        assert os.path.basename(found["path"]) in message or "model.layers" in message
        assert len(message) < 3000 and plain(message) == plain(results[0][2])
        assert not any(ord(letter) < 32 for letter in message.replace(str(found["path"]), "").replace("\n", ""))
    if not refused_by_read:
        assert found["read"] is None or found["read"][1]
    assert found["files_same"] and found["built_same"]
    assert found["bare_same"] or found["loads"][1] is None and not refused_by_read
    assert found["seconds"] < 1 and found["megabytes"] < 200


def plain(message):
    """Removes the tensor name: of several wrong tensors, the library may name any."""
    return re.sub("`.*`", "", message)


def test_the_corpus_is_large():
    assert len(CASES) >= 180
    assert {error for _, error, _, _ in CASES.values()} == {
        "AdapterFormatError",
        "TruncatedAdapterError",
        "ShapeMismatchError",
        "MissingTensorsError",
        "UnexpectedTensorsError",
        "RankMismatchError",
        "NotFiniteError",
    }
