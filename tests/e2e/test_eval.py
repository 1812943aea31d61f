"""docs/eval.md's example on stories260K and Shakespeare: it got better and has forgotten; a budget for that holds."""

import json
import re
import shlex

import pytest
import yaml

from mindlora.training.report.history import read_history
from tests.support import stories260k
from tests.support.runs import ROOT, python, succeeded
from tests.support.what_runs import shows

PROGRAMS = {"mindlora": "mindlora.cli", "mindlora-run": "mindlora.training.launch.launcher"}
BUDGET = 0.3


def blocks():
    """Returns the blocks of code of docs/eval.md's example: the commands, and what the last one prints."""
    text = (ROOT / "docs" / "eval.md").read_text(encoding="utf-8")
    example = text[text.index("## An example") :]
    commands, printed = re.findall(r"^```\n(.*?)^```", example, re.M | re.S)[:2]
    return commands.replace("\\\n", " ").strip().splitlines(), printed


def run(command, folder):
    program, *words = shlex.split(command, comments=True)
    return succeeded(python(["-m", PROGRAMS[program], *words], folder))


@pytest.fixture(scope="module")
def example(library, tmp_path_factory):
    """The folder in which the commands ran, and what the last one printed."""
    folder = tmp_path_factory.mktemp("example")
    stories260k.write_folder(folder / "stories260K")
    plays = stories260k.data_file("tinyshakespeare.txt").read_text(encoding="utf-8")
    (folder / "plays.txt").write_text(plays[:15_000], encoding="utf-8")
    (folder / "other_plays.txt").write_text(plays[-8_000:], encoding="utf-8")
    (folder / "stories.txt").write_text("\n***\n".join(stories260k.stories()), encoding="utf-8")
    *commands, last = blocks()[0]
    for command in commands:
        run(command, folder)
    return folder, run(f"{last} --json", folder)


def test_the_adapter_is_better_where_it_was_trained_and_has_forgotten(example):
    report = json.loads(example[1].splitlines()[-1])
    plays, _, stories, _, moved = report["measures"]
    assert plays["verdicts"] == {"plays": "better"} and stories["verdicts"] == {"plays": "worse"}
    assert moved["values"]["plays"]["low"] > BUDGET
    (sentence,) = report["verdicts"]
    shown = " ".join(blocks()[1].split())
    # All but the numbers, which differ in their last digits from one MindSpore to another.
    without_numbers = [re.sub(r"\d+(\.\d+)?", "N", text) for text in (sentence, shown)]
    assert without_numbers[1].endswith(without_numbers[0])
    for number, told in zip(re.findall(r"\d+\.?\d*", sentence), re.findall(r"\d+\.?\d*", shown[-len(sentence) :])):
        assert float(number) == pytest.approx(float(told), rel=0.05)


@shows("forgetting", "llama")
def test_a_run_keeps_within_its_budget(example):
    folder, _ = example
    config = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    config.update(output_dir="./kept")
    config["runner_config"].update(epochs=1, gradient_accumulation_steps=4)
    config["lr_schedule"]["learning_rate"] = 0.01
    config["callbacks"] += [
        {"type": "Forgetting", "every_steps": 2, "samples": 8, "max_tokens": 24},
        {"type": "ForgettingBudget", "budget": BUDGET, "max_returns": 9},
    ]
    (folder / "kept.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run("mindlora-run --config kept.yaml", folder)
    history = read_history(str(folder / "kept"))
    returns = [event["step"] for event in history.events if event["event"] == "budget"]
    assert returns and [record["step"] for record in history.forgetting if record["forgetting"] > BUDGET] == returns
    last = history.forgetting[-1]
    assert last["forgetting"] <= BUDGET or last["step"] in returns
