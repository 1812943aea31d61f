"""The commands of every page do what they do there, as they stand, in a folder where what they name exists.

Those of one page run in their order in one folder, so that what one writes the next one reads.
"""

import os
import shlex
import shutil

import httpx
import pytest

from mindlora import cli
from tests.conftest import ROOT
from tests.support import documented_worlds, forked
from tests.support.served_llama import serving
from tests.test_documented_commands import LEFT_OPEN, PAGES, commands_of

# Commands that work on files alone, and run in this process.
OF_FILES = (*("adapter", "base", "configs", "data", "plan", "report", "runs", "suggest"),)
# Commands that do not run here: how they begin -> why not.
LEFT = {
    "mindlora-run --config configs/llama2/": "trains Llama 2 7B on NPUs",
    "mindlora-run --config configs/qwen3/": "trains Qwen3 8B on NPUs",
    "mindlora report --live": "shows a page until Ctrl-C; tests/training/report/test_live.py runs it",
    "mindlora doctor --adopt": "takes the report of an NPU",
    "mindlora-run --config my.yaml --mode 1": "needs an NPU: MindFormers' PyNative Trainer has no operators on a CPU",
    "mindlora sweep my.yaml": "the same",
    "mindlora plan my.yaml": "reads the base and the tokenizer of scripts/quickstart.sh, which trains for minutes",
    "mindlora doctor my.yaml": "the same",
    "mindlora-run --config my.yaml --load_checkpoint Qwen3-tiny": "the same",
    "mindlora generate --model Qwen3-tiny": "the same",
    "mindlora data alpaca --input ../../scripts/quickstart_data": "the same",
    "mindlora base convert Qwen3-8B-FP8": "reads a model of 8 GB",
    "mindlora base quantize Qwen3-8B-bnb-4bit": "the same, in 4 bits",
    "mindlora-run --config qwen3.yaml --load_checkpoint Qwen3-8B-AWQ": "the same",
    "mindlora generate --model Qwen3-8B-AWQ": "the same",
    "mindlora-run --config npu.yaml": "trains Qwen3 8B on NPUs",
    "mindlora plan run.yaml --verify": "compiles a run for an NPU, which takes MindSpore's Ascend backend minutes",
}
# Pages that tests/e2e goes through, from the first command to the last, and what of them it leaves: how it begins.
IN_E2E = {
    "README.md": ("mindlora plan", "mindlora classify", "mindlora serve"),
    "docs/classifiers.md": (),
    "docs/distillation.md": (),
    "docs/eval.md": ("mindlora eval --config", "mindlora eval --model FOLDER"),
    "docs/preferences.md": (),
    "docs/rl.md": (),
    "docs/sweep.md": (),
}


def reason_to_leave(words):
    """Returns why a command is not run here, or None."""
    command = shlex.join(words)
    if LEFT_OPEN & set(words):
        return "it leaves words to its reader"
    return next((reason for start, reason in LEFT.items() if command.startswith(start)), None)


def is_of_files(words):
    return words[0] == "mindlora" and words[1] in OF_FILES


def commands(document):
    """Returns the commands of a page that run here."""
    begins = IN_E2E.get(document, ("",))
    found = (words for words in commands_of(document) if shlex.join(words).startswith(begins))
    return [words for words in found if reason_to_leave(words) is None]


WITH_COMMANDS = [document for document in PAGES if commands(document)]
OF_FILES_ALONE = [document for document in WITH_COMMANDS if all(map(is_of_files, commands(document)))]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What the pages name."""
    before = os.getcwd()
    folder = tmp_path_factory.mktemp("world")
    try:
        documented_worlds.write_world(folder)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def page(world, tmp_path, monkeypatch):
    """A copy of it, in which a page's commands run."""
    folder = tmp_path / "page"
    shutil.copytree(world, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


def placed(words, folder, written):
    """Returns a command whose /path/to is in the folder; what it writes is not there, or the page has written it."""
    for option, name in zip(words, words[1:]):
        if option == "--output" and name not in written and os.path.exists(name):
            (shutil.rmtree if os.path.isdir(name) else os.remove)(name)
        written |= {name} if option == "--output" else set()
    return [word.replace("/path/to/", f"{folder}/path/to/") for word in words]


@pytest.mark.parametrize("document", OF_FILES_ALONE)
def test_commands_that_work_on_files_are_done(document, page, capsys):
    failed, written = [], set()
    for words in commands(document):
        code = cli.main(placed(words[1:], page, written))
        errors = capsys.readouterr().err
        failed += [f"{shlex.join(words)}: {errors[-500:]}"] if code else []
    assert not failed, f"{document} has commands that fail:\n" + "\n".join(failed)


def test_what_is_left_is_on_the_pages():
    every = [shlex.join(words) for document in PAGES for words in commands_of(document)]
    assert [start for start in LEFT if not any(command.startswith(start) for command in every)] == []


# The lines of a shell around commands that load a model, which train and answer in processes of their own.
PROGRAMS = {"mindlora": "mindlora.cli", "mindlora-run": "mindlora.training.launch.launcher"}
WITH_A_MODEL = [path for path in WITH_COMMANDS if path not in OF_FILES_ALONE and path != "README.zh-CN.md"]


def run_here(words, typed, folder):
    """Runs a command in a process of its own; returns its exit code and the end of what it wrote to stderr."""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = forked.run(["-m", PROGRAMS[words[0]], *words[1:]], folder, environment, typed=typed)
    return done.returncode, done.stderr[-1500:]


def serve_here(words, folder):
    """Runs a server until it is ready, and asks it for its health; ends it, which it has to do with exit code 0."""
    with serving(str(folder), source=words[2:]) as server:
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("document", WITH_A_MODEL)
def test_commands_with_a_model_are_done(document, page):
    typed, written = (page / "letter.txt").read_text(encoding="utf-8"), set()
    for words in commands(document):
        given = placed(words, page, written)
        if words[:2] == ["mindlora", "serve"]:
            serve_here(given, page)
            continue
        code, errors = run_here(given, typed, page)
        assert code == 0, f"{document}: {shlex.join(words)}\n{errors}"
