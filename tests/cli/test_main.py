"""The command line itself: verbs, help and plugin-path. Each group of verbs has a test file of its own."""

import glob
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import mindlora
from mindlora import cli
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from tests.conftest import ROOT

ADAPTER_VERBS = ["convert", "inspect", "diff", "combine", "resize", "gather", "scatter"]
BASE_VERBS = ["convert", "quantize", "merge"]
EARLIER = {
    **{verb: f"adapter {verb}" for verb in ADAPTER_VERBS},
    **{"convert-base": "base convert", "quantize-base": "base quantize", "merge": "base merge"},
}


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


@pytest.mark.parametrize("closed, printed", [(">&-", False), ("2>&-", True)])
def test_a_stream_may_be_closed(closed, printed):
    environment = {**os.environ, "PYTHONPATH": ROOT}
    command = f"{sys.executable} -m mindlora.cli configs {closed}"
    run = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr, "llama2" in run.stdout) == (0, "", printed)


@pytest.mark.parametrize("words", [[], ["date"], ["data"], ["data", "alpaca"], ["adapter"], ["base", "inspect"]])
def test_a_wrong_command_line_is_usage(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert "usage: mindlora" in capsys.readouterr().err


@pytest.mark.parametrize("group, verbs", [("adapter", ADAPTER_VERBS), ("base", BASE_VERBS)])
def test_a_group_lists_its_verbs(group, verbs, capsys):
    for words in ([group], [group, "unpack"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"mindlora {group}: error: ") and re.findall(r"\w+", error)[-len(verbs) :] == verbs
    with pytest.raises(SystemExit):
        cli.main([group, "--help"])
    assert re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.M) == verbs


@pytest.mark.parametrize("name", EARLIER)
def test_an_earlier_name_works_and_says_what_it_is_called_now(name, capsys):
    printed = []
    for words in ([name], EARLIER[name].split()):
        with pytest.raises(SystemExit) as stopped:
            cli.main([*words, "--help"])
        printed.append((stopped.value.code, *capsys.readouterr()))
    said = f'"mindlora {name}" is called "mindlora {EARLIER[name]}" now; this name goes with the next version.\n'
    assert printed[0] == (0, printed[1][1], said) and printed[1][2] == ""


def test_what_an_earlier_name_prints_as_json_is_json(tmp_path, capsys):
    adapter = Adapter({("wq", "A"): np.ones((2, 8), np.float32), ("wq", "B"): np.ones((6, 2), np.float32)}, {"wq": 4.0})
    adapter_files.write(adapter, str(tmp_path / "one"), to="peft")
    assert cli.main(["inspect", str(tmp_path / "one"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == [2]


def test_the_help_has_no_earlier_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    verbs = re.findall(r"^    ([a-z][a-z-]+)\b", capsys.readouterr().out, re.M)
    assert {"data", "adapter", "base", "serve"} <= set(verbs) and not set(EARLIER) & set(verbs)


def test_no_page_message_or_script_uses_an_earlier_name():
    """But the change log, which says what was renamed, and the table of the names themselves."""
    # A string or a comment may go on in the next line.
    command = re.compile(
        rf"mindlora(?:\.cli\W+|[\s\"'#]+(?:f?[\"'])?)({'|'.join(EARLIER)})\b|[^\"-](convert|quantize)-base\b"
    )
    found = []
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "configs/**/*",
        "mindlora/**/*.py",
        "examples/**/*",
        "scripts/**/*",
        "ops/*/*.md",
    ):
        for path in filter(os.path.isfile, glob.glob(os.path.join(ROOT, pattern), recursive=True)):
            if path.endswith((".md", ".py", ".sh", ".yaml")) and os.path.basename(path) != "CHANGELOG.md":
                with open(path, encoding="utf-8") as file:
                    found += [f"{path}: {match.group()}" for match in command.finditer(file.read())]
    assert found == []
    assert (
        command.search('mindlora "\n  f"convert x')
        and command.search("mindlora merge")
        and command.search("`convert-base`")
    )
    assert not command.search("mindlora adapter convert, mindlora base merge, mindlora merges")
