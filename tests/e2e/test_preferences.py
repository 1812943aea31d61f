"""The example of docs/preferences.md on stories260K: the rewards of held-out pairs come into the right order."""

import re
import shlex

import pytest
import yaml

from mindlora.training.report.history import read_history
from tests.support import stories260k
from tests.support.runs import ROOT, python, succeeded
from tests.support.what_runs import shows

PROMPT = "Once upon a time, Ben saw a red ball at home."
PROGRAMS = {"mindlora": "mindlora.cli", "mindlora-run": "mindlora.training.launch.launcher"}


def blocks(kind):
    """The blocks of the page of one kind."""
    text = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


def commands(program):
    """The commands of the example that begin so."""
    text = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    return re.search(rf"^```\n({program} .*?)^```", text, re.M | re.S)[1].splitlines()


@pytest.fixture(scope="module")
def history(library, tmp_path_factory):
    """What the run of the page measured."""
    folder = tmp_path_factory.mktemp("preferences")
    stories260k.write_folder(folder / "model", kept=3)
    succeeded(python(["-c", blocks("python")[0]], folder))
    # Half of them teach as much.
    pairs = (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "pairs.jsonl").write_text("".join(pairs[::2]), encoding="utf-8")
    for command in commands("mindlora data"):
        program, *words = shlex.split(command)
        succeeded(python(["-m", PROGRAMS[program], *words], folder))
    config = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    stated = yaml.safe_load(blocks("yaml")[0])
    assert stated["train_dataset"].items() <= config["train_dataset"].items()
    assert stated["runner_wrapper"].items() <= config["runner_wrapper"].items()
    asking = {"type": "SampleAnswers", "prompts": [PROMPT], "tokenizer": "model", "template": "plain", "max_tokens": 12}
    config["callbacks"].append(asking)
    # Rows at once, which a tiny model learns from sooner than one by one.
    config["runner_config"].update(epochs=1, batch_size=16, gradient_accumulation_steps=1)
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    (training,) = commands("mindlora-run")
    succeeded(python(["-m", PROGRAMS["mindlora-run"], *shlex.split(training)[1:]], folder))
    return read_history(str(folder / "output"))


def test_held_out_rewards_rise(history):
    steps, accuracy = history.series("held_out_reward_accuracy")
    # Before training no reward is larger than another one. A few steps are enough for this rule.
    assert len(steps) == 2 and accuracy[-1] > 0.95
    margins = history.series("held_out_reward_margin")[1]
    assert 0 < margins[0] < margins[-1]


def test_every_step_is_measured(history):
    _, losses = history.series("loss")
    for name in ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "log_probability_chosen"):
        assert len(history.series(name)[1]) == len(losses)
    # DPO begins at log 2, where model and reference are the same.
    assert losses[0] == pytest.approx(0.693147, abs=1e-4) and losses[-1] < losses[0]


@shows("answers", "llama")
def test_answers_before_and_after(history):
    before, after = history.answers
    assert (before["step"], after["step"]) == (0, history.last_step)
    texts = [record["answers"][0]["answer"] for record in (before, after)]
    assert all(texts) and texts[0] != texts[1]
