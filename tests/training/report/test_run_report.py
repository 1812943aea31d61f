"""RunReport in MindSpore's own training loop: what it records, when it writes the page, and a run that is resumed."""

import importlib.util
import json
import math
import types

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindformers.tools.register import MindFormerConfig
from mindformers.utils import tensorboard

from mindlora.training.callbacks.common import report_event
from mindlora.training.callbacks.registry import LoraCheckpoint, ProgressBar, RunReport, arrange_callbacks
from mindlora.training.launch import hooks  # noqa: F401
from mindlora.training.report import run_report
from mindlora.training.report.history import read_history
from mindlora.training.run_configuration import remember_configuration
from mindlora.training.step.train_step import StepRecord
from tests.support import tiny_runs
from tests.support.event_files import scalars_of
from tests.support.histories import health
from tests.support.scripted_runs import Model, Report, ScriptedStep, StopAt, train

LOSSES = [3.0, 2.5, 2.0, 1.5, 1.0]


class MeasuredStep(ScriptedStep):
    """A train step that measures as LoraTrainOneStepCell does."""

    is_mindformers_step = False

    def __init__(self, network):
        super().__init__(network)
        self.exchange = types.SimpleNamespace(bytes_per_step=4096)
        self.steps = 0

    def set_rate_factor(self, source, value):
        """Tells the callbacks that this is mindlora's."""

    def last_record(self):
        self.steps += 1
        skipped = self.steps == 3
        return StepRecord(math.nan if skipped else 1 / self.steps, 0.5, 100.0, skipped, False, 1e-3)


class Events(ms.Callback):
    """Reports an event at a step and when the run ends, and adapters' health at a step and then the same again."""

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        if params.cur_step_num == 2:
            report_event(params, "guard", "The loss is <high>.")
            report = health(2, 1)
            params["adapter_health"] = types.SimpleNamespace(step=2, to_json=lambda: report)

    def on_train_end(self, run_context):
        report_event(run_context.original_args(), "stop", "Enough.")


def test_everything_is_recorded(tmp_path):
    held_out = Report("held_out_loss", {2: 0.75, 5: 0.5})
    train([Events(), held_out, RunReport(str(tmp_path))], LOSSES, step=MeasuredStep(Model()))
    history = read_history(str(tmp_path))
    assert [step["step"] for step in history.steps] == [1, 2, 3, 4, 5]
    assert [step["skipped"] for step in history.steps] == [False, False, True, False, False]
    assert [history.steps[index]["loss"] for index in (0, 3)] == [1, 0.25] and math.isnan(history.steps[2]["loss"])
    for step in history.steps:
        fixed = {name: step[name] for name in ("learning_rate", "gradient_norm", "tokens", "bytes_exchanged")}
        assert fixed == {"learning_rate": 1e-3, "gradient_norm": 0.5, "tokens": 100, "bytes_exchanged": 4096}
        assert step["tokens_per_second"] > 0 and 1e8 < step["memory_bytes"] < 1e12
    times = [step["time"] for step in history.steps]
    for before, now, step in zip(times, times[1:], history.steps[1:]):
        assert step["tokens_per_second"] == pytest.approx(100 / (now - before), rel=1e-3)
    held_out_steps, held_out_losses = history.series("held_out_loss")
    assert held_out_steps.tolist() == [2, 5] and held_out_losses.tolist() == [0.75, 0.5]
    assert {record["held_out_reward_accuracy"] for record in history.held_out} == {None}
    assert [(event["step"], event["event"]) for event in history.events] == [(2, "guard"), (5, "stop")]
    assert [record["step"] for record in history.health] == [2]
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "The loss is &lt;high&gt;." in page and "Enough." in page and "attention.wq" in page


def test_a_train_step_of_others_gives_its_loss(tmp_path):
    train([RunReport(str(tmp_path))], LOSSES, epochs=2)
    history = read_history(str(tmp_path))
    assert history.series("loss")[1].tolist() == LOSSES * 2
    assert {step["tokens_per_second"] for step in history.steps} == {None}
    (run,) = history.runs
    assert run["run"]["total_steps"] == 10 and run["run"]["data"] == {
        "rows in a step, on each device": 1,
        "steps in an epoch": 5,
        "epochs": 2,
    }
    assert run["run"]["versions"]["mindspore"] == ms.__version__ and run["run"]["machine"]["processes"] == 1


def test_what_only_describes_a_run_never_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "describe", lambda params: params.nothing_of_this_kind.at_all)
    train([RunReport(str(tmp_path))], LOSSES)
    history = read_history(str(tmp_path))
    assert history.series("loss")[1].tolist() == LOSSES and history.runs[0]["run"]["total_steps"] == 5
    assert (tmp_path / "report.html").exists()


class Pages(ms.Callback):
    """Records at which steps there is a page."""

    def __init__(self, page):
        super().__init__()
        self.page, self.steps = page, []

    def on_train_step_end(self, run_context):
        if self.page.exists():
            self.steps.append(run_context.original_args().cur_step_num)
            self.page.unlink()


def test_the_page_is_written_at_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "_PAUSE", 0)
    pages = Pages(tmp_path / "report.html")
    train([LoraCheckpoint(2, str(tmp_path / "saved")), RunReport(str(tmp_path)), pages], LOSSES)
    assert pages.steps == [2, 4, 5] and (tmp_path / "report.html").exists()


def test_the_page_takes_a_small_part_of_the_time(tmp_path):
    pages = Pages(tmp_path / "report.html")
    train([LoraCheckpoint(1, str(tmp_path / "saved")), RunReport(str(tmp_path)), pages], LOSSES)
    assert pages.steps[:1] == [1] and len(pages.steps) < 5


def test_a_resumed_run_continues_its_history(tmp_path, caplog):
    def callbacks(**resume):
        return [LoraCheckpoint(2, str(tmp_path / "saved"), **resume), RunReport(str(tmp_path))]

    step = ScriptedStep(Model())
    train([*callbacks(), StopAt(3)], LOSSES, step=step)
    first = read_history(str(tmp_path))
    assert [record["step"] for record in first.steps] == [1, 2, 3]
    train(callbacks(resume=str(tmp_path / "saved" / "step_2")), LOSSES, skip=2)
    history = read_history(str(tmp_path))
    assert [record["step"] for record in history.steps] == [1, 2, 3, 4, 5]
    assert [run["step"] for run in history.runs] == [0, 2] and history.steps[:2] == first.steps[:2]
    assert "held 1 records of an earlier run after step 2; they are now in metrics_earlier.jsonl" in caplog.text
    assert "Resumed" in (tmp_path / "report.html").read_text("utf-8")


def test_without_jinja2_there_are_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    train([RunReport(str(tmp_path))], LOSSES)
    assert len(read_history(str(tmp_path)).steps) == 5 and not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "report.html").mkdir()
    train([RunReport(str(tmp_path))], LOSSES)
    assert len(read_history(str(tmp_path)).steps) == 5 and (tmp_path / "report.html").is_dir()


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "get_real_rank", lambda: 1)
    train([RunReport(str(tmp_path))], LOSSES)
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_what_mflossmonitor_leaves_out(tmp_path, monkeypatch):
    """Through the writer that MindFormers makes where a YAML has tensorboard.tensorboard_dir."""
    monkeypatch.setattr(tensorboard, "_GLOBAL_TENSORBOARD_WRITER", None)
    tensorboard._set_tensorboard_writer(types.SimpleNamespace(tensorboard_dir=str(tmp_path / "board")))
    callbacks = [Report("held_out_loss", {2: 1.0}), RunReport(str(tmp_path))]
    train(callbacks, LOSSES[:2], step=MeasuredStep(Model()))
    tensorboard.get_tensorboard_writer().close()
    scalars = scalars_of(tmp_path / "board")
    each = ["tokens-per-second", "bytes-exchanged", "memory-bytes"]
    assert scalars.keys() == {*((tag, step) for tag in each for step in (1, 2)), ("held-out-loss", 2)}
    assert scalars["held-out-loss", 2] == 1
    for record in read_history(str(tmp_path)).steps:
        np.testing.assert_allclose(scalars["memory-bytes", record["step"]], record["memory_bytes"], rtol=1e-6)


def test_the_configuration_comes_with_what_is_known_of_defaults(tmp_path):
    path = str(tmp_path / "rows.mindrecord")
    tiny_runs.write_data(path, rows=8)
    config = MindFormerConfig(tiny_runs.LORA_YAML)
    config.train_dataset.data_loader.dataset_dir = path
    arrange_callbacks(config)
    assert [callback["type"] for callback in config.callbacks].count("RunReport") == 1
    remember_configuration(config)
    model = Model()
    model.config = types.SimpleNamespace(pad_token_id=tiny_runs.PAD, ignore_token_id=tiny_runs.IGNORED)
    train([RunReport(str(tmp_path))], LOSSES, step=ScriptedStep(model))
    run = read_history(str(tmp_path)).runs[0]["run"]
    with open(tiny_runs.LORA_YAML, encoding="utf-8") as file:
        expected = yaml.safe_load(file)
    assert run["configuration"]["optimizer"] == expected["optimizer"]
    assert run["configuration"]["callbacks"][-1] == {"type": "RunReport"}
    defaults = {
        "seed": 1, "runner_config.epochs": 1, "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8,
        "lr_schedule.lr_end": 0, "model.model_config.hidden_size": 4096, "callbacks.LoraCheckpoint.keep_last": 3,
        "runner_wrapper.use_clip_grad": False, "runner_wrapper.micro_batches": 1,
        "model.model_config.pet_config.lora_dropout": 0,
    }  # fmt: skip
    assert {key: run["defaults"].get(key) for key in defaults} == defaults
    json.dumps(run)
    assert run["data"]["rows"] == 8 and run["data"]["tokens in a row"] == tiny_runs.SEQUENCE + 1
    shares = [float(value.rstrip("%")) for name, value in run["data"].items() if name.startswith("tokens in the loss")]
    assert len(shares) == 1 and 60 < shares[0] < 80


def test_the_progress_bar_shows_what_was_measured(capfd):
    bar, held_out = ProgressBar(), Report("held_out_loss", {2: 0.75})
    train([held_out, bar], LOSSES, step=MeasuredStep(Model()))
    last = capfd.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert "5/5 steps (100%), 00:00 left, loss 0.200, held-out 0.750, " in last and last.endswith(" tokens/s")
