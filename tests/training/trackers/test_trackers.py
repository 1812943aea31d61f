"""Trackers in MindSpore's own training loop: what TensorBoard gets, and trackers that are missing, refuse or die.

The other trackers, as they are, have tests/trackers.
"""

import importlib.util
import logging
import math
import threading
import time

import mindspore as ms
import pytest

from mindlora.core.errors import ConfigError
from mindlora.training.callbacks.common import report_event
from mindlora.training.callbacks.registry import LoraCheckpoint, RunReport, Trackers
from mindlora.training.report.history import read_history
from mindlora.training.run_configuration import remember_configuration
from mindlora.training.trackers import trackers
from mindlora.training.trackers.tracker import TRACKERS, Tracker
from mindlora.training.trackers.trackers import Sender
from tests.support.event_files import hyperparameters_of, scalars_of, texts_of
from tests.support.histories import health
from tests.support.scripted_runs import Report, StopAt, train

LOSSES = [3.0, 2.5, math.nan, 1.5, 1.0]


class Tell(ms.Callback):
    """Measures the adapter's health at step 2, and reports an event at step 4."""

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        if params.cur_step_num == 2:
            report = health(2, 1)
            params["adapter_health"] = type("Health", (), {"step": 2, "to_json": staticmethod(lambda: report)})
        if params.cur_step_num == 4:
            report_event(params, "guard", "The loss is high.")


class Await(ms.Callback):
    """Lets a run wait at step 3 until a tracker has refused what it is to refuse."""

    def __init__(self, tracker):
        super().__init__()
        self.tracker = tracker

    def on_train_step_end(self, run_context):
        until = time.monotonic() + 30
        while run_context.original_args().cur_step_num == 3 and self.tracker.refused and time.monotonic() < until:
            time.sleep(0.01)


class Scripted(Tracker):
    """A tracker that keeps what it gets, and refuses as often as it is told; each class is one run."""

    package = "mindspore"

    def begin(self, run):
        self.runs.append(run)
        self.got.append("begin")
        return "scripted"

    def configuration(self, facts):
        self.got.append("configuration")

    def numbers(self, step, seconds, values):
        if step in self.refused:
            self.refused.remove(step)
            raise ConnectionError("the server is gone")
        if "loss" in values:
            self.got.append((step, values["loss"]))

    def event(self, step, kind, message):
        self.got.append((step, kind, message))

    def report(self, path):
        self.got.append("report")

    def end(self, failed):
        self.got.append("failed" if failed else "end")


@pytest.fixture
def scripted(monkeypatch):
    kind = type("Fresh", (Scripted,), {"got": [], "runs": [], "refused": []})
    monkeypatch.setitem(TRACKERS, "wandb", kind)
    return kind


def warnings(caplog):
    ours = [record for record in caplog.records if record.name == "mindlora"]
    return [record.message for record in ours if record.levelno >= logging.WARNING]


def test_tensorboard_has_every_number_of_the_history_at_its_step(tmp_path):
    remember_configuration({"optimizer": {"type": "AdamW"}})
    callbacks = [Report("held_out_loss", {2: 0.75}), Tell(), RunReport(str(tmp_path))]
    train([*callbacks, Trackers("tensorboard", name="first", tags=["tiny"])], LOSSES)
    scalars, texts = scalars_of(tmp_path / "tensorboard"), texts_of(tmp_path / "tensorboard")
    history = read_history(str(tmp_path))
    for record in history.steps:
        for name in ("loss", "memory_bytes", "skipped"):
            assert scalars.pop((name, record["step"])) == pytest.approx(float(record[name]), rel=1e-6, nan_ok=True)
    assert scalars.pop(("held_out_loss", 2)) == 0.75
    cells = history.health[0]["health"]["cells"]
    path, cell = next(iter(cells.items()))
    assert scalars["health/" + path + "/parts/A/norm", 2] == pytest.approx(cell["parts"]["A"]["norm"], rel=1e-6)
    # Nothing else but health was measured.
    assert {(name.partition("/")[0], step) for name, step in scalars} == {("health", 2)}
    assert len({name.rpartition("/parts")[0] for name, _ in scalars if "/parts/" in name}) == len(cells)
    assert texts["events/guard/text_summary", 4] == "The loss is high."
    described = texts["configuration/text_summary", 0]
    assert "name: first" in described and "- tiny" in described and "type: AdamW" in described
    last = history.steps[-1]
    page = texts["report/text_summary", last["step"]]
    assert str(tmp_path / "report.html") in page and f"| loss | {last['loss']:.6g} | {last['step']} |" in page
    assert "| held_out_loss | 0.75 | 2 |" in page and "health/" not in page
    hyperparameters, metrics = hyperparameters_of(tmp_path / "tensorboard")
    assert hyperparameters == {"optimizer.type": "AdamW"} and {"loss", "held_out_loss"} <= metrics


def test_a_resumed_run_goes_on_as_the_same_run(tmp_path):
    def callbacks(**resume):
        return [LoraCheckpoint(2, str(tmp_path / "saved"), **resume), RunReport(str(tmp_path)), Trackers("tensorboard")]

    losses = [3.0, 2.5, 2.0, 1.5, 1.0]
    train([*callbacks(), StopAt(3)], losses)
    train(callbacks(resume=str(tmp_path / "saved" / "step_2")), [3.0, 2.5, 9.0, 1.5, 1.0], skip=2)
    scalars = scalars_of(tmp_path / "tensorboard")
    found = [scalars["loss", step] for step in range(1, 6)]
    assert found == [3.0, 2.5, 9.0, 1.5, 1.0]
    texts = texts_of(tmp_path / "tensorboard")
    assert {step for name, step in texts if name.startswith("configuration")} == {0, 2}


def test_the_id_of_a_run_is_kept_for_its_resumption_and_no_longer(tmp_path, scripted):
    def callbacks(**resume):
        saving = LoraCheckpoint(2, str(tmp_path / "saved"), **resume)
        return [saving, RunReport(str(tmp_path / "run")), Trackers("wandb")]

    train([*callbacks(), StopAt(3)], LOSSES)
    train(callbacks(resume=str(tmp_path / "saved" / "step_2")), LOSSES, skip=2)
    train(callbacks(), LOSSES[:1])
    assert [(run.id, run.step) for run in scripted.runs] == [(None, 0), ("scripted", 2), (None, 0)]
    assert [run.name_or(None) for run in scripted.runs] == ["run"] * 3
    resumed = scripted.got[scripted.got.index("end") + 1 :]
    # What was sent before is not sent again.
    assert resumed[:2] == ["begin", "configuration"] and resumed[3] == (4, 1.5)


def test_a_tracker_that_a_resumed_run_has_for_the_first_time_gets_all_of_it(tmp_path, scripted):
    train([LoraCheckpoint(2, str(tmp_path / "saved")), RunReport(str(tmp_path)), StopAt(3)], LOSSES)
    resumed = LoraCheckpoint(2, str(tmp_path / "saved"), resume=str(tmp_path / "saved" / "step_2"))
    train([resumed, RunReport(str(tmp_path)), Trackers("wandb")], LOSSES, skip=2)
    assert scripted.got[:4] == ["begin", "configuration", (1, 3.0), (2, 2.5)]


def test_what_a_server_refused_is_sent_when_the_run_ends(tmp_path, caplog, scripted):
    scripted.refused += [2]
    callbacks = [Tell(), RunReport(str(tmp_path)), Trackers("wandb"), Await(scripted)]
    train(callbacks, [3.0, 2.5, 2.0, 1.5, 1.0])
    steps = [(1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5), (4, "guard", "The loss is high."), (5, 1.0)]
    assert scripted.got == ["begin", "configuration", *steps, "report", "end"]
    (message,) = warnings(caplog)
    assert "wandb does not take the run (ConnectionError: the server is gone)" in message
    assert [record["loss"] for record in read_history(str(tmp_path)).steps] == [3.0, 2.5, 2.0, 1.5, 1.0]


def test_a_server_that_stays_away_ends_no_run(tmp_path, caplog, scripted):
    scripted.refused += [2] * 100
    train([RunReport(str(tmp_path)), Trackers("wandb")], LOSSES)
    assert scripted.got == ["begin", "configuration", (1, 3.0), "report", "end"]
    assert len(read_history(str(tmp_path)).steps) == 5
    first, last = warnings(caplog)
    assert "does not take the run" in first and "has not taken all of the run" in last


def test_a_tracker_that_never_answers_ends_no_run(tmp_path, caplog, monkeypatch, scripted):
    monkeypatch.setattr(Sender, "patience", 0.5)
    answer = threading.Event()
    monkeypatch.setattr(scripted, "numbers", lambda *values: answer.wait(20))
    train([RunReport(str(tmp_path)), Trackers("wandb")], LOSSES)
    assert "wandb has not taken all of the run" in warnings(caplog)[-1]
    assert len(read_history(str(tmp_path)).steps) == 5
    # Another run of the process does not wait as long again.
    began = time.monotonic()
    train([RunReport(str(tmp_path / "other")), Trackers("wandb")], LOSSES[:1])
    assert Sender.patience == 0 and time.monotonic() - began < 10
    answer.set()


def test_a_tracker_that_cannot_begin_is_left_out(tmp_path, caplog, monkeypatch, scripted):
    monkeypatch.setattr(scripted, "begin", lambda self, run: 1 / 0)
    train([RunReport(str(tmp_path)), Trackers(["wandb", "tensorboard"])], LOSSES)
    (message,) = warnings(caplog)
    assert "wandb cannot begin (ZeroDivisionError: division by zero), and the run goes on without it" in message
    assert len(scalars_of(tmp_path / "tensorboard")) == 15 and scripted.got == []


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is not None, reason="swanlab is installed here")
def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, caplog):
    train([RunReport(str(tmp_path)), Trackers(["swanlab", "tensorboard"])], LOSSES)
    (message,) = warnings(caplog)
    assert "swanlab is not installed, and the run goes on without it: pip install 'mindlora[swanlab]'" in message
    assert len(scalars_of(tmp_path / "tensorboard")) == 15


def test_an_error_ends_the_run_of_the_tracker_as_failed(tmp_path, scripted):
    class Break(ms.Callback):
        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 3:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train([RunReport(str(tmp_path)), Trackers("wandb"), Break()], [3.0, 2.5, 2.0, 1.5, 1.0])
    assert scripted.got == ["begin", "configuration", (1, 3.0), (2, 2.5), (3, 2.0), "failed"]


def test_an_adapter_among_others_is_a_run_of_the_group(tmp_path, scripted):
    train([RunReport(str(tmp_path / "swept" / "large")), Trackers("wandb", adapter="large")], LOSSES[:1])
    (run,) = scripted.runs
    assert run.name_or("of the environment") == "large" and run.group_or(None) == "swept"
    train([RunReport(str(tmp_path / "alone")), Trackers("wandb", name="first")], LOSSES[:1])
    assert scripted.runs[1].name_or("of the environment") == "first" and scripted.runs[1].group_or(None) is None


def test_rank_0_alone_sends(tmp_path, monkeypatch, scripted):
    monkeypatch.setattr(trackers, "get_real_rank", lambda: 1)
    train([RunReport(str(tmp_path)), Trackers("wandb")], LOSSES)
    assert not scripted.got


def test_without_a_report_there_is_nothing_to_send():
    with pytest.raises(ConfigError, match="add RunReport to callbacks"):
        train([Trackers("tensorboard")], LOSSES)
