"""LoraCheckpoint: when it saves, what it keeps, and which is best."""

import json
import logging

import pytest

from mindlora.core.errors import ConfigError
from mindlora.files.adapters import files as adapter_files
from mindlora.training.callbacks.registry import LoraCheckpoint
from mindlora.training.resume import training_state
from tests.support.scripted_runs import STEPS_PER_EPOCH, Report, StopAt, folders, marked_step, train

pytestmark = pytest.mark.usefixtures("pynative_mode")


# When it saves, and what it keeps


def test_saves_every_few_steps_and_at_the_end(tmp_path):
    train([LoraCheckpoint(save_steps=2, directory="saved", keep_last=9)], [1] * STEPS_PER_EPOCH)
    assert folders("saved") == ["best", "step_2", "step_4", "step_5"]
    assert [marked_step(tmp_path / "saved" / name) for name in ("step_2", "step_4", "step_5")] == [2, 4, 5]


def test_saves_where_another_callback_stops_the_run():
    train([LoraCheckpoint(save_steps=2, directory="saved"), StopAt(3)], [1] * STEPS_PER_EPOCH)
    assert folders("saved") == ["best", "step_2", "step_3"]


def test_saves_when_several_steps_are_reported_at_once():
    # As with data sinking of three steps at a time.
    assert [step for step in range(3, 16, 3) if training_state.passed(5, step - 3, step)] == [6, 12, 15]


def test_keeps_the_last_step_folders_and_the_best():
    train([LoraCheckpoint(save_steps=1, directory="saved", keep_last=2)], [1, 2, 3, 4, 5])
    assert folders("saved") == ["best", "step_4", "step_5"]
    assert marked_step("saved/best") == 1


def test_directory_is_in_the_output_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(training_state, "get_output_root_path", lambda: str(tmp_path / "run"))
    train([LoraCheckpoint()], [1, 2])
    assert folders(tmp_path / "run" / "lora_checkpoint") == ["best", "step_2"]


def test_what_an_earlier_run_saved_is_set_aside(caplog):
    train([LoraCheckpoint(save_steps=1, directory="saved", keep_last=2)], [1, 1, 1, 1])
    assert "earlier run" not in caplog.text
    train([LoraCheckpoint(save_steps=1, directory="saved", keep_last=2)], [9, 9])
    assert "saved held saves of an earlier run; they have been moved to" in caplog.text
    train([LoraCheckpoint(save_steps=1, directory="saved", keep_last=2)], [5, 5])
    assert folders("saved") == ["best", "step_1", "step_2", "earlier_run_1", "earlier_run_2"]
    assert folders("saved/earlier_run_1") == ["best", "step_3", "step_4"]
    assert folders("saved/earlier_run_2") == ["best", "step_1", "step_2"]
    assert training_state.best_value("saved/best", "loss") == 5


# Which is best


def test_best_by_mean_training_loss_since_the_last_save():
    train([LoraCheckpoint(save_steps=2, directory="saved")], [5, 5, 9, 1, 0, 8, 9, 0])
    assert marked_step("saved/best") == 6
    assert training_state.best_value("saved/best", "loss") == 4


def test_a_loss_that_is_not_finite_is_never_best():
    train([LoraCheckpoint(save_steps=1, directory="saved", best_mode="max")], [3, float("inf"), float("nan"), 2])
    assert marked_step("saved/best") == 1


@pytest.mark.parametrize("mode, step", [("min", 4), ("max", 2)])
def test_best_by_a_reported_metric(mode, step):
    report = Report("held_out_loss", {2: 0.9, 4: 0.2, 6: 0.5})
    train(
        [report, LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss", best_mode=mode)], [1] * 6
    )
    assert marked_step("saved/best") == step
    with open("saved/best/best.json", encoding="utf-8") as file:
        assert json.load(file) == {"step": step, "held_out_loss": report.values[step]}


def test_the_best_may_be_measured_between_two_saves():
    report = Report("held_out_loss", {1: 0.9, 2: 0.5, 3: 0.2, 4: 0.4, 5: 0.6})
    train([report, LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss")], [1] * 5)
    assert folders("saved") == ["best", "step_2", "step_4", "step_5"] and marked_step("saved/best") == 3


def test_the_last_step_can_be_the_best_by_a_reported_metric():
    report = Report("held_out_loss", {2: 0.9, 4: 0.8, 5: 0.1})
    train([report, LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss")], [1] * 5)
    assert marked_step("saved/best") == 5


def test_a_run_stopped_where_the_metric_was_not_measured_is_saved_nevertheless():
    report = Report("held_out_loss", {2: 0.9})
    train(
        [report, LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss"), StopAt(3)],
        [1] * STEPS_PER_EPOCH,
    )
    assert folders("saved") == ["best", "step_2", "step_3"]
    assert marked_step("saved/best") == 2


def test_the_log_has_the_metric_of_a_step_at_which_another_callback_stops_the_run(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mindlora"), "propagate", True)
    checkpoint = LoraCheckpoint(save_steps=100, directory="saved", best_metric="held_out_loss")
    with caplog.at_level(logging.INFO, logger="mindlora"):
        train([Report("held_out_loss", {3: 0.25}), checkpoint, StopAt(3)], [1] * STEPS_PER_EPOCH)
    assert "step_3 (held_out_loss: 0.25)" in caplog.text and marked_step("saved/best") == 3


@pytest.mark.parametrize(
    "callbacks",
    [[], [Report("held_out_loss", {3: 0.1})], [Report("accuracy", {2: 0.1})]],
    ids=["no metric", "at other steps", "another metric"],
)
def test_a_metric_that_is_not_reported(callbacks):
    checkpoint = LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss")
    with pytest.raises(
        ConfigError,
        match="best_metric is 'held_out_loss', but at step 2 only these are reported: (accuracy, )?loss. List the "
        "callback that reports it before LoraCheckpoint",
    ):
        train([*callbacks, checkpoint], [1] * STEPS_PER_EPOCH)
    # What was trained is not lost.
    assert adapter_files.read("saved/step_2").paths


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"save_steps": 0}, "save_steps is 0: it must be a whole number of at least 1"),
        ({"save_steps": 2.5}, "save_steps is 2.5"),
        ({"keep_last": True}, "keep_last is True"),
        ({"best_mode": "least"}, "best_mode is 'least', but it must be 'min' or 'max'"),
        ({"resume": 3}, "resume is 3, but it must be True, False or the path"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LoraCheckpoint(**arguments)
