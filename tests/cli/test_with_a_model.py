"""mindlora generate and chat on MindFormers' network: the answers of training's greedy search, switches, Ctrl-C."""

import json
import os

import pytest

from tests.conftest import ROOT
from tests.support import forked
from tests.support.served_llama import write_llama, write_qwen3
from tests.support.terminal_runs import PROMPTS


@pytest.fixture(scope="module")
def ended(library, tmp_path_factory):
    """What generate, chat and training said, in one process."""
    folder = tmp_path_factory.mktemp("terminal")
    write_llama(str(folder))
    write_qwen3(str(folder / "qwen3"))
    environment = {**os.environ, "PYTHONPATH": ROOT}
    run = forked.run([os.path.join(ROOT, "tests", "support", "terminal_runs.py")], folder, environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "ended.json").read_text())


@pytest.fixture(scope="module")
def answers(ended):
    """(adapter, prompt) -> text of generate."""
    code, out, _ = ended["generate"]
    assert code == 0
    return {(answer["adapter"], answer["prompt"]): answer["text"] for answer in json.loads(out)["answers"]}


def test_generate_answers_as_greedy_search_in_training_does(ended, answers):
    for adapter, texts in zip((None, "first"), ended["greedy"]):
        assert [answers[adapter, prompt] for prompt in PROMPTS] == texts
    assert len(set(answers.values())) == len(answers) == 9


def test_the_folder_of_the_model_answers_as_its_yaml(ended, answers):
    code, out, told = ended["from the folder"]
    assert code == 0, told
    found = {(answer["adapter"], answer["prompt"]): answer["text"] for answer in json.loads(out)["answers"]}
    # The folder's answers end at the template's end of a turn too, with which two of them begin.
    ended_at_once = [key for key, text in found.items() if not text]
    assert found == {**answers, **dict.fromkeys(ended_at_once, "")} and len(ended_at_once) < 3
    assert told.startswith("mindlora: loading base ...") and json.loads(out)["model"] == "base"


def test_a_qwen3_chats_from_its_folder_through_its_template(ended):
    code, out, told = ended["qwen3"]
    assert code == 0, told
    *texts, again = out.removesuffix("\n").split("\n")
    # Random weights look at little more than the end of the prompt, which the template gives to all of them.
    assert len(texts) == len(PROMPTS) and all(texts) and again == texts[-1]


def test_the_start_is_told_on_stderr_alone(ended):
    _, _, told = ended["generate"]
    starts = ("loading run.yaml ...", "loaded in ", "compiling ...", "compiled in ", "prompts: ", "9 answers, ")
    lines = told.splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(f"mindlora: {start}") for line, start in zip(lines, starts))


def test_a_chat_switches_adapters_and_goes_on_after_ctrl_c(ended, answers):
    code, out, _ = ended["chat"]
    first = PROMPTS[0]
    said = [answers["first", first], answers["second", first], answers[None, first]]
    # The answer at whose first piece Ctrl-C came is empty; the next one is whole.
    assert (code, out) == (0, "\n".join([*said, "", answers[None, first], ""]))
