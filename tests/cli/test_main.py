"""The command line itself: verbs, help and plugin-path. Each group of verbs has a test file of its own."""

import json
import os
import subprocess
import sys

import pytest

import mindlora
from mindlora import cli
from tests.conftest import ROOT


def test_plugin_path_is_the_folder_of_the_bridge(capsys):
    assert cli.main(["plugin-path"]) == 0
    folder = capsys.readouterr().out.strip()
    assert os.listdir(folder).count("bridge.py") == 1
    assert cli.main(["plugin-path", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": folder}


def test_help_and_plugin_path_do_not_wait_for_mindspore():
    code = (
        "import sys; from mindlora import cli; cli.main(['plugin-path']); "
        "sys.exit(any(name in sys.modules for name in ('mindspore', 'mindformers')))"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"mindlora {mindlora.__version__}\n"


def test_a_reader_that_stops_early_gets_no_traceback():
    command = f"{sys.executable} -m mindlora.cli configs | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": ROOT}
    run = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("words", [[], ["date"], ["data"], ["data", "alpaca"]])
def test_a_wrong_command_line_is_usage(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert "usage: mindlora" in capsys.readouterr().err
