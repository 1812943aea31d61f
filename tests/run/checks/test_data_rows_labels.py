"""Data in which nothing counts: an error wherever a run reads it, by the labels that the model's loss counts."""

import numpy as np
import pytest

from mindlora.core.yaml_file import PET, merged
from mindlora.run.checks.data_rows import check_labels
from mindlora.run.checks.finding import errors
from mindlora.run.checks.pynative import check_pynative
from mindlora.run.yaml_run import YamlRun

LENGTH, IGNORED, PAD = 4, -100, 0


def row(labels, tokens=(5, 6, 7, 8, 9), **columns):
    """Returns a row of LENGTH + 1 tokens; a label is the token's own, or does not count."""
    tokens = np.array(tokens, np.int32)
    return {"input_ids": tokens, "labels": np.where(np.array(labels), tokens, IGNORED), **columns}


COUNTED, NOTHING = row([0, 0, 0, 1, 1]), row([0, 0, 0, 0, 0])
FIRST = row([1, 0, 0, 0, 0])
AFTER_PADDING = row([0, 0, 0, 1, 0], tokens=(5, PAD, PAD, 8, PAD))


def pair(answers, marks):
    answers = np.array(answers, np.int32)
    return {"input_ids": np.ones_like(answers), "labels": answers, "answers": answers, "pairs": np.array(marks)}


@pytest.fixture
def found(tmp_path):
    """Returns a function that checks a run whose files hold given rows: keys of a YAML, and file -> rows."""

    def check(changes=None, **files):
        def path(name):
            return str(tmp_path / f"{name}.mindrecord")

        for name in files:
            (tmp_path / f"{name}.mindrecord").touch()
        config = {
            "run_mode": "finetune",
            "train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": path("train")}},
            "callbacks": [{"type": "HeldOutLoss", "dataset_dir": path("held_out")}],
            "model": {"model_config": {"type": "LlamaConfig", "seq_length": LENGTH, "pad_token_id": PAD}},
        }
        rows = {path(name): given for name, given in files.items()}
        findings = check_labels(YamlRun(merged(config, changes or {})), lambda file, count: iter(rows[file][:count]))
        return [str(finding) for finding in errors(findings)]

    return check


def test_one_label_that_counts_suffices(found):
    assert found(train=[NOTHING] * 300 + [COUNTED], held_out=[NOTHING, COUNTED]) == []


@pytest.mark.parametrize("nothing", [NOTHING, FIRST, AFTER_PADDING], ids=["none", "the first", "after padding"])
def test_data_without_a_label_that_counts_is_an_error_and_so_is_held_out_data(found, nothing):
    (message,) = found(train=[nothing] * 3, held_out=[COUNTED])
    assert message.startswith("train_dataset: no label of ") and "train.mindrecord counts in the loss" in message
    (message,) = found(train=[COUNTED], held_out=[nothing] * 3)
    assert message.startswith("callbacks.HeldOutLoss: no label of ") and "held_out.mindrecord" in message


def test_the_data_of_each_adapter_is_looked_at(found, tmp_path):
    changes = {}
    node = changes
    for key in PET.split("."):
        node = node.setdefault(key, {})
    node["adapters"] = [{"name": "a"}, {"name": "b", "data": str(tmp_path / "own.mindrecord")}]
    (message,) = found(changes, train=[COUNTED], own=[NOTHING])
    assert message.startswith(f"{PET}.adapters[1].data: no label of ")


def test_rows_of_which_all_tokens_count_need_no_labels(found):
    assert found(train=[{"input_ids": COUNTED["input_ids"]}]) == []
    assert found({"train_dataset": {"input_columns": ["input_ids"]}}, train=[NOTHING]) == []


def test_preferences_count_by_their_answers_and_examples(found):
    answers, none = [[-1, -1, 0, 0, 0], [-1, -1, 1, 1, -1]], [[-1] * 5] * 2
    assert found(train=[pair(none, [0]), pair(answers, [1])]) == []
    assert len(found(train=[pair(none, [1]), pair(answers, [0])])) == 1


def test_the_pynative_trainer_needs_labels_too(tmp_path):
    path = str(tmp_path / "rows.mindrecord")
    (tmp_path / "rows.mindrecord").touch()

    def findings(rows):
        config = {
            "model": {"seq_length": LENGTH},
            "train_dataset": {"dataloader": {"type": "MindDataset", "dataset_files": path}},
            "callbacks": [{"type": "HeldOutLoss", "dataset_dir": path}],
        }
        return [str(each) for each in errors(check_pynative(config, first_rows=lambda file, count: iter(rows)))]

    assert findings([NOTHING, COUNTED]) == []
    first, second = findings([NOTHING, FIRST])
    assert first.startswith("train_dataset: no label") and second.startswith("callbacks.HeldOutLoss: no label")
