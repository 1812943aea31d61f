"""Steps without a token that counts: what EmptySteps says of them, and that the other callbacks pass over them."""

import json

import numpy as np
import pytest

from mindlora.training.callbacks.registry import (
    EmptySteps,
    GradientNormRate,
    LoraCheckpoint,
    ReduceOnPlateau,
    RunReport,
    TrainingGuard,
)
from mindlora.training.report.history import read_history
from tests.support.controlled_runs import RATE, play
from tests.support.scripted_runs import Model, ScriptedStep, folders, marked_step, train


class OfMindFormers(ScriptedStep):
    """mindlora's train step where the step is MindFormers' own, which records nothing."""

    is_mindformers_step = True

    def last_record(self):
        raise AssertionError("MindFormers' step has no record.")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_is_an_event_and_the_end_of_the_run_counts_them(caplog):
    _, events, error = play([EmptySteps()], [1.0] * 5, empty=(2, 4))
    assert error is None and events.events == [(2, "empty_step"), (4, "empty_step")]
    assert "2 of the 5 steps had nothing to learn" in caplog.text


def test_in_mindformers_own_step_the_loss_tells_of_them(caplog):
    train([EmptySteps(), LoraCheckpoint(1, "saved", keep_last=9)], [1.0, 0.0, 2.0], step=OfMindFormers(Model()))
    assert "1 of the 3 steps had nothing to learn" in caplog.text
    with open("saved/best/best.json", encoding="utf-8") as file:
        assert json.load(file) == {"loss": 1.0, "step": 1}


def test_a_run_without_one_says_nothing(caplog):
    _, events, _ = play([EmptySteps()], [1.0] * 3)
    assert not events.events and "nothing to learn" not in caplog.text


def test_they_are_no_fault_of_the_run():
    _, events, error = play([TrainingGuard(max_skipped=2)], [1.0] * 8, empty=(3, 4, 5, 6))
    assert error is None and not events.events


def test_they_do_not_change_the_rate():
    controls = [GradientNormRate(window=4, growth=0.5), ReduceOnPlateau("loss", every_steps=2, patience=0)]
    empty, _, _ = play(controls, [1.0] * 5, empty=(3, 4, 5))
    assert empty.rates == [RATE] * 5
    controls = [GradientNormRate(window=4, growth=0.5), ReduceOnPlateau("loss", every_steps=2, patience=0)]
    assert play(controls, [1.0] * 5)[0].rates != [RATE] * 5


def test_they_are_never_the_best_and_leave_the_mean_of_the_others():
    _, _, error = play([LoraCheckpoint(2, "saved", keep_last=9)], [4.0, 9.0, 3.0, 5.0, 1.0, 1.0], empty=(2, 5, 6))
    assert error is None and folders("saved") == ["best", "step_2", "step_4", "step_6"]
    with open("saved/best/best.json", encoding="utf-8") as file:
        assert json.load(file) == {"loss": 4.0, "step": 2}
    assert marked_step("saved/best") == 2


def test_they_have_no_loss_in_the_history():
    play([RunReport("run")], [4.0, 9.0, 3.0], empty=(2,))
    steps, losses = read_history("run").series("loss")
    assert steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(losses, [4.0, np.nan, 3.0])
