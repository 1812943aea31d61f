"""The example of docs/classifiers.md on stories260K: held-out texts get their labels, and the adapter is PEFT's."""

import json
import re
import shlex

import pytest
import yaml

from mindlora.files.adapters import files
from mindlora.training.report.history import read_history
from tests.support import stories260k
from tests.support.runs import ROOT, python, succeeded

PROGRAMS = {"mindlora": "mindlora.cli", "mindlora-run": "mindlora.training.launch.launcher"}
PAGE = ROOT / "docs" / "classifiers.md"


def blocks(kind):
    """The blocks of the page of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    """A folder with the model."""
    folder = tmp_path_factory.mktemp("classifiers")
    stories260k.write_folder(folder / "model", kept=2)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """The folder of the run of the page, and what its commands printed."""
    succeeded(python(["-c", blocks("python")[0]], folder))
    printed = carry_out("mindlora data ", folder)
    config = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    changes = yaml.safe_load(blocks("yaml")[0])
    config["model"]["arch"].update(changes["model"]["arch"])
    config["model"]["model_config"].update(changes["model"]["model_config"])
    # Fewer steps, and faster ones.
    config["runner_config"].update(batch_size=16, gradient_accumulation_steps=1, epochs=1)
    config["lr_schedule"]["learning_rate"] = 2e-3
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    printed += succeeded(python(["-m", PROGRAMS["mindlora-run"], "--config", "run.yaml"], folder))
    return folder, printed


def carry_out(begin, folder):
    """Carries out the commands of the page that begin so; returns what they print."""
    commands = re.search(rf"^```\n({begin}.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)[1]
    printed = ""
    for command in commands.splitlines():
        program, *words = shlex.split(command)
        printed += succeeded(python(["-m", PROGRAMS[program], *words], folder))
    return printed


def test_a_reward_model_learns_which_of_two_answers_is_better(folder, tmp_path):
    """By the pairs of docs/preferences.md, and with the keys that docs/classifiers.md names."""
    page = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    model = folder / "model"
    succeeded(python(["-c", re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1]], tmp_path))
    pairs = (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs[:240]), encoding="utf-8")
    convert = ("--input", "pairs.jsonl", "--output", "pairs.mindrecord", "--tokenizer", model, "--seq-length", "128")
    succeeded(python(["-m", "mindlora.cli", "data", "preference", *convert, "--pack", "--holdout", "0.1"], tmp_path))
    draft = ("--from", model, "--data", "pairs.mindrecord", "--device", "cpu", "--output", "run.yaml")
    succeeded(python(["-m", "mindlora.cli", "configs", *draft], tmp_path))
    config = yaml.safe_load((tmp_path / "run.yaml").read_text(encoding="utf-8"))
    changes = yaml.safe_load(blocks("yaml")[1])
    config["model"]["arch"].update(changes["model"]["arch"])
    config["model"]["model_config"].update(changes["model"]["model_config"])
    config["runner_wrapper"].update(changes["runner_wrapper"])
    config["train_dataset"].update(changes["train_dataset"])
    config["train_dataset_task"]["dataset_config"] = config["train_dataset"]
    # The rate is for more steps than this test takes.
    config["lr_schedule"]["learning_rate"] = 3e-3
    config["runner_config"].update(epochs=1, batch_size=8, gradient_accumulation_steps=1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    succeeded(python(["-m", PROGRAMS["mindlora-run"], "--config", "run.yaml"], tmp_path))
    history = read_history(str(tmp_path / "output"))
    assert history.series("held_out_reward_accuracy")[1][-1] > 0.9
    adapter = files.read(str(tmp_path / "output" / "lora_checkpoint" / "best"))
    assert adapter.saved_modules["score.weight"].shape == (1, 64)


def test_held_out_texts_get_their_labels(run):
    folder, printed = run
    assert "model_config: num_labels: 2 (0 happy, 1 sad)" in printed
    assert json.loads((folder / "stories-labels.json").read_text()) == ["happy", "sad"]
    history = read_history(str(folder / "output"))
    accuracy, f1 = (history.series(f"held_out_{name}")[1] for name in ("accuracy", "f1"))
    assert accuracy[-1] > 0.9 and f1[-1] > 0.9
    losses = history.series("loss")[1]
    assert losses[-1] < 0.8 * losses[0]


def test_the_adapter_is_a_classifiers(run):
    folder = run[0] / "output" / "lora_checkpoint" / "best"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    adapter = files.read(str(folder))
    assert adapter.saved_modules["score.weight"].shape == (2, 64) and "score" not in adapter.paths


def test_texts_are_labeled_by_the_command_of_the_page(run):
    printed = carry_out("mindlora classify ", run[0])
    lines = [line.split("\t") for line in printed.splitlines() if line.count("\t") == 2]
    assert [(label, text) for label, _, text in lines] == [
        ("sad", "She was scared and ran away."),
        ("happy", "It was the best day ever."),
    ]
    assert all(0.5 < float(probability) <= 1 for _, probability, _ in lines)
