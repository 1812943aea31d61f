"""LoraCheckpoint: when it saves, what it keeps, which is best, and that a resumed run is the uninterrupted one."""
import json
import os
import pathlib
import shutil
import types

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindspore import Tensor, nn

from mindlora import LoraConfig, adapter_file, apply_lora, freeze_base, load_lora
from mindlora.errors import BaseMismatchError, ConfigError
from mindlora.plugin import resume
from mindlora.plugin.callbacks import LoraCheckpoint
from tests.plugin import tiny_runs

STEPS_PER_EPOCH = 5


class Model(nn.Cell):
    """Stands for a MindFormers model: a linear cell with an adapter, and a configuration."""

    def __init__(self, dropout=0.0, weight=0.5):
        super().__init__()
        self.wq = nn.Dense(3, 3, weight_init=Tensor(np.full((3, 3), weight, np.float32)))
        self.config = types.SimpleNamespace()
        config = LoraConfig(lora_rank=2, lora_alpha=4, lora_dropout=dropout, target_modules="wq")
        apply_lora(self, config)
        freeze_base(self)


class ScriptedStep(nn.Cell):
    """A train step that trains nothing: its loss is what the data says."""

    def __init__(self, network, optimizer=nn.AdamWeightDecay):
        super().__init__(auto_prefix=False)
        self.network = network
        self.optimizer = optimizer(network.trainable_params())

    def construct(self, loss):
        return loss.mean()


class MarkAdapter(ms.Callback):
    """Puts the step into B, so that a saved adapter tells at which step it was saved."""

    def on_train_step_begin(self, run_context):
        params = run_context.original_args()
        params.train_network.network.wq.mindpet_delta_lora_b.set_data(
            Tensor(np.full((3, 2), params.cur_step_num, np.float32)))


class Report(ms.Callback):
    """Reports a metric, given by step."""

    def __init__(self, name, values):
        super().__init__()
        self.name, self.values = name, values

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        params["eval_results"] = {}
        if params.cur_step_num in self.values:
            params["eval_results"] = {self.name: self.values[params.cur_step_num]}


class StopAt(ms.Callback):
    """Stops a run after a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == self.step:
            run_context.request_stop()


def train(callbacks, losses, epochs=1, skip=0, step=None):
    """Lets MindSpore's own training loop run over scripted losses, which are those of one epoch."""
    dataset = ms.dataset.NumpySlicesDataset(np.asarray(losses, np.float32), shuffle=False).batch(1)
    if skip:
        dataset.set_init_step(skip)
    step = step or ScriptedStep(Model())
    ms.Model(step).train(epochs, dataset, [MarkAdapter(), *callbacks], dataset_sink_mode=False)


def marked_step(folder):
    """Returns the step at which the adapter in ``folder`` was saved, after loading it."""
    model = Model()
    load_lora(model, str(folder))
    return int(model.wq.mindpet_delta_lora_b.asnumpy()[0, 0])


def folders(directory):
    return sorted(os.listdir(directory), key=lambda name: (len(name), name))


@pytest.fixture(autouse=True)
def _pynative():
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=before)


# When it saves, and what it keeps

def test_saves_every_so_many_steps_and_at_the_end(tmp_path):
    train([LoraCheckpoint(save_steps=2, directory="saved", keep_last=9)], [1] * STEPS_PER_EPOCH)
    assert folders("saved") == ["best", "step_2", "step_4", "step_5"]
    assert [marked_step(tmp_path / "saved" / name) for name in ("step_2", "step_4", "step_5")] == [2, 4, 5]


def test_saves_where_another_callback_stops_the_run():
    train([LoraCheckpoint(save_steps=2, directory="saved"), StopAt(3)], [1] * STEPS_PER_EPOCH)
    assert folders("saved") == ["best", "step_2", "step_3"]


def test_saves_when_several_steps_are_reported_at_once():
    # As with a dataset that sinks three steps at a time to the device.
    assert [step for step in range(3, 16, 3) if resume.passed(5, step - 3, step)] == [6, 12, 15]


def test_keeps_the_last_step_folders_and_the_best():
    train([LoraCheckpoint(save_steps=1, directory="saved", keep_last=2)], [1, 2, 3, 4, 5])
    assert folders("saved") == ["best", "step_4", "step_5"]
    assert marked_step("saved/best") == 1


def test_directory_is_in_the_output_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "get_output_root_path", lambda: str(tmp_path / "run"))
    train([LoraCheckpoint()], [1, 2])
    assert folders(tmp_path / "run" / "lora_checkpoint") == ["best", "step_2"]


def test_what_an_earlier_run_left_is_moved_aside():
    train([LoraCheckpoint(save_steps=1, directory="saved", keep_last=2)], [1, 1, 1, 1])
    train([LoraCheckpoint(save_steps=1, directory="saved", keep_last=2)], [9, 9])
    train([LoraCheckpoint(save_steps=1, directory="saved", keep_last=2)], [5, 5])
    assert folders("saved") == ["best", "step_1", "step_2", "earlier_run_1", "earlier_run_2"]
    assert folders("saved/earlier_run_1") == ["best", "step_3", "step_4"]
    assert folders("saved/earlier_run_2") == ["best", "step_1", "step_2"]
    assert resume.best_value("saved/best", "loss") == 5


# Which is best

def test_best_by_mean_training_loss_since_the_last_save():
    train([LoraCheckpoint(save_steps=2, directory="saved")], [5, 5, 9, 1, 0, 8, 9, 0])
    assert marked_step("saved/best") == 6
    assert resume.best_value("saved/best", "loss") == 4


def test_a_loss_that_is_not_finite_is_never_best():
    train([LoraCheckpoint(save_steps=1, directory="saved", best_mode="max")], [3, float("inf"), float("nan"), 2])
    assert marked_step("saved/best") == 1


@pytest.mark.parametrize("mode, step", [("min", 4), ("max", 2)])
def test_best_by_a_reported_metric(mode, step):
    report = Report("held_out_loss", {2: 0.9, 4: 0.2, 6: 0.5})
    train([report, LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss", best_mode=mode)],
          [1] * 6)
    assert marked_step("saved/best") == step
    with open("saved/best/best.json", encoding="utf-8") as file:
        assert json.load(file) == {"step": step, "held_out_loss": report.values[step]}


def test_the_last_step_can_be_the_best_by_a_reported_metric():
    report = Report("held_out_loss", {2: 0.9, 4: 0.8, 5: 0.1})
    train([report, LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss")], [1] * 5)
    assert marked_step("saved/best") == 5


def test_a_run_stopped_where_the_metric_was_not_measured_is_saved_all_the_same():
    report = Report("held_out_loss", {2: 0.9})
    train([report, LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss"), StopAt(3)],
          [1] * STEPS_PER_EPOCH)
    assert folders("saved") == ["best", "step_2", "step_3"]
    assert marked_step("saved/best") == 2


@pytest.mark.parametrize("callbacks", [[], [Report("held_out_loss", {3: 0.1})], [Report("accuracy", {2: 0.1})]],
                         ids=["not there", "at other steps", "another metric"])
def test_a_metric_that_is_not_reported(callbacks):
    checkpoint = LoraCheckpoint(save_steps=2, directory="saved", best_metric="held_out_loss")
    with pytest.raises(ConfigError, match="best_metric is 'held_out_loss', but at step 2 only (accuracy, )?loss is "
                                          "reported.*before LoraCheckpoint"):
        train([*callbacks, checkpoint], [1] * STEPS_PER_EPOCH)


@pytest.mark.parametrize("arguments, message", [
    ({"save_steps": 0}, "save_steps is 0, it must be a whole number of at least 1"),
    ({"save_steps": 2.5}, "save_steps is 2.5"),
    ({"keep_last": True}, "keep_last is True"),
    ({"best_mode": "least"}, "best_mode is 'least', it must be 'min' or 'max'"),
    ({"resume": 3}, "resume is 3, it must be True, False or the path"),
])
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LoraCheckpoint(**arguments)


# What cannot be resumed

@pytest.fixture
def stopped(tmp_path):
    """A run of two epochs that was stopped after step 7."""
    train([LoraCheckpoint(directory=str(tmp_path / "saved")), StopAt(7)], [1] * STEPS_PER_EPOCH, epochs=2)
    return str(tmp_path / "saved" / "step_7")


def resume_from(folder, losses=(1,) * STEPS_PER_EPOCH, epochs=2, skip=7, step=None):
    train([LoraCheckpoint(directory="resumed", resume=folder)], losses, epochs, skip, step)


def test_resumes_in_place_and_stops_at_the_last_step(stopped):
    resume_from(stopped)
    assert folders("resumed") == ["best", "step_10"]
    assert marked_step("resumed/step_10") == 10


def test_nothing_to_resume_from():
    with pytest.raises(ConfigError, match="resume is True, but .*resumed holds no step_N folder"):
        resume_from(True)
    with pytest.raises(ConfigError, match="there is no folder elsewhere to resume from"):
        resume_from("elsewhere")


def test_an_adapter_without_training_state(stopped):
    with pytest.raises(ConfigError, match="best holds no training_state.json.*set pet_config.adapter_path"):
        resume_from(os.path.join(os.path.dirname(stopped), "best"))


def test_other_steps_per_epoch(stopped):
    with pytest.raises(ConfigError, match="saved at 5 steps per epoch, this run has 4"):
        resume_from(stopped, losses=[1] * 4)


def test_a_dataset_that_was_not_skipped(stopped):
    with pytest.raises(ConfigError, match="stopped after step 7, but the dataset starts at step 0: set "
                                          "data_skip_steps: 7"):
        resume_from(stopped, skip=0)


def test_a_run_that_was_complete(stopped):
    params = types.SimpleNamespace(batch_num=STEPS_PER_EPOCH, epoch_num=1)
    with pytest.raises(ConfigError, match="is of step 7, and this run ends at step 5.*Raise epochs"):
        resume.restore(stopped, params)


def test_another_optimizer(stopped):
    def momentum(parameters):
        return nn.Momentum(parameters, 0.1, 0.9)
    with pytest.raises(ConfigError, match=r"another optimizer.* only in the folder: adam_m.wq.mindpet_delta_lora_a, .*"
                                          r"only in this run: .*moments.wq.mindpet_delta_lora_a"):
        resume_from(stopped, step=ScriptedStep(Model(), momentum))


def test_another_base(stopped):
    step = ScriptedStep(Model(weight=0.25))
    with pytest.raises(BaseMismatchError, match="another base"):
        resume_from(stopped, step=step)


@pytest.fixture
def warnings(monkeypatch):
    """The warnings that LoraCheckpoint logs."""
    said = []
    monkeypatch.setattr("mindlora.plugin.callbacks.logger.warning", lambda text, *values: said.append(text % values))
    return said


def test_dropout_is_warned_of(stopped, warnings):
    resume_from(stopped)
    assert not warnings
    shutil.rmtree("resumed")
    resume_from(stopped, step=ScriptedStep(Model(dropout=0.1)))
    assert len(warnings) == 1 and "lora_dropout is above 0: the resumed run drops other elements" in warnings[0]


# Real runs, in processes of their own

class Run:
    """A configuration of the tiny LoRA run, and its folders."""

    def __init__(self, folder, rows, epochs, mode, scale_sense, checkpoint, **pet):
        self.folder, self.mode, self.pet = folder, mode, pet
        self.data, self.held_out = str(folder / "train.mindrecord"), str(folder / "heldout.mindrecord")
        tiny_runs.write_data(self.data, rows)
        tiny_runs.write_data(self.held_out, 6)
        self.epochs, self.scale_sense, self.checkpoint = epochs, scale_sense, checkpoint

    def start(self, name, script=None, **checkpoint):
        """Runs it to its end, which is the process's too, and returns (process, output folder)."""
        callbacks = [{"type": "ProgressBar"}, {"type": "LossCurve"},
                     {"type": "HeldOutLoss", "dataset_dir": self.held_out, "every_steps": 2},
                     {"type": "LoraCheckpoint", "best_metric": "held_out_loss", **self.checkpoint, **checkpoint}]
        config = tiny_runs.tiny_config(self.data, self.epochs, callbacks)
        config["context"]["mode"] = self.mode
        config["model"]["model_config"]["pet_config"].update(self.pet)
        config["runner_wrapper"]["scale_sense"] = self.scale_sense
        config["lr_schedule"]["warmup_ratio"] = 0.3
        return tiny_runs.launch(config, self.folder / name, script), self.folder / name


# Dies as by kill -9 in the middle of writing step_8: its adapter is there, its training state is not.
KILLED_WHILE_SAVING = """
import os, signal, sys
from mindlora.plugin import resume
from mindlora.plugin.launcher import main
save_file = resume.save_file
def save_or_die(tensors, path):
    if ".step_8." in path:
        os.kill(os.getpid(), signal.SIGKILL)
    save_file(tensors, path)
resume.save_file = save_or_die
sys.exit(main())
"""


@pytest.fixture(scope="module")
def graph_runs(tmp_path_factory):
    """In graph mode with a dynamic loss scale: a whole run, one that is killed, and the same one resumed."""
    scale = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 4}
    run = Run(tmp_path_factory.mktemp("graph"), rows=20, epochs=3, mode=0, scale_sense=scale,
              checkpoint={"save_steps": 2, "keep_last": 99})
    whole = run.start("whole")
    killed = run.start("stopped", KILLED_WHILE_SAVING)
    left = folders(run.folder / "stopped" / "lora_checkpoint")
    resumed = run.start("stopped", resume=True)
    return types.SimpleNamespace(whole=whole, killed=killed, left=left, resumed=resumed)


def test_a_killed_run_leaves_whole_step_folders(graph_runs):
    process, output = graph_runs.killed
    assert process.returncode == -9
    assert [name for name in graph_runs.left if not name.startswith(".")] == ["best", "step_2", "step_4", "step_6"]
    assert any(name.startswith(".step_8.") for name in graph_runs.left)
    for step in (2, 4, 6):
        assert set(tiny_runs.state(output / "lora_checkpoint" / f"step_{step}")) == set(
            tiny_runs.state(graph_runs.whole[1] / "lora_checkpoint" / f"step_{step}"))


def test_resumed_in_the_second_epoch_it_is_the_uninterrupted_run(graph_runs):
    (whole_process, whole), (process, resumed) = graph_runs.whole, graph_runs.resumed
    assert (whole_process.returncode, process.returncode) == (0, 0), process.stderr[-2000:]
    for step in (8, 10, 12, 14, 15):
        name = pathlib.Path("lora_checkpoint") / f"step_{step}"
        tiny_runs.assert_same_state(whole / name, resumed / name)
    losses = tiny_runs.losses(whole)
    assert list(losses) == list(range(1, 16)) and len(set(losses.values())) == 15
    assert tiny_runs.losses(resumed) == {step: losses[step] for step in range(7, 16)}
    # The loss scale did change, so that restoring it matters.
    scales = [float(tiny_runs.state(whole / "lora_checkpoint" / f"step_{step}")["scale_sense"]) for step in (2, 6, 15)]
    assert scales == [1024, 2048, 8192]


def test_a_resumed_run_reports_its_place(graph_runs):
    process, _ = graph_runs.resumed
    lines = [line for line in process.stdout.splitlines() if "Epoch:[" in line]
    assert "Epoch:[  2/  3], step:[    2/    5]" in lines[0] and "Epoch:[  3/  3], step:[    5/    5]" in lines[-1]
    assert len(lines) == 9
    assert "| 6/15 steps" in process.stderr and "| 15/15 steps" in process.stderr and "| 0/15" not in process.stderr


def test_best_is_that_of_the_whole_run(graph_runs):
    (_, whole), (_, resumed) = graph_runs.whole, graph_runs.resumed
    with open(whole / "loss_curve.json", encoding="utf-8") as file:
        held_out = json.load(file)["held_out"]
    assert [step for step, _ in held_out] == [2, 4, 6, 8, 10, 12, 14, 15]
    step, loss = min(held_out, key=lambda point: point[1])
    for output in (whole, resumed):
        with open(output / "lora_checkpoint" / "best" / "best.json", encoding="utf-8") as file:
            assert json.load(file) == {"step": step, "held_out_loss": loss}


def test_resumed_in_pynative_from_a_named_folder(tmp_path_factory):
    # With all that makes cells differ, and modules that are trained whole.
    run = Run(tmp_path_factory.mktemp("pynative"), rows=12, epochs=2, mode=1, scale_sense=4.0,
              checkpoint={"save_steps": 2, "keep_last": 99}, use_rslora=True, rank_pattern={"w2": 3},
              alpha_pattern={r".*\.wq": 5}, modules_to_save=["lm_head", "attention_norm"])
    _, whole = run.start("whole")
    process, resumed = run.start("resumed", resume=str(whole / "lora_checkpoint" / "step_4"))
    assert process.returncode == 0, process.stderr[-2000:]
    assert folders(resumed / "lora_checkpoint") == ["best", "step_6"]
    adapter = adapter_file.read(str(whole / "lora_checkpoint" / "step_6"))
    assert {path.rpartition(".")[2]: (adapter.rank(path), adapter.alphas[path]) for path in adapter.paths} == {
        "wq": (8, 5.0), "w2": (3, 12.0)}
    assert set(adapter.whole) == {"lm_head.weight", "model.layers.0.attention_norm.weight"} and adapter.use_rslora
    first = adapter_file.read(str(whole / "lora_checkpoint" / "step_2"))
    assert all((first.whole[name] != array).any() for name, array in adapter.whole.items())
    tiny_runs.assert_same_state(whole / "lora_checkpoint" / "step_6", resumed / "lora_checkpoint" / "step_6")
    assert tiny_runs.losses(resumed) == {step: loss for step, loss in tiny_runs.losses(whole).items() if step > 4}


def test_a_complete_run_is_not_resumed(tmp_path):
    from mindformers.tools.register import MindFormerConfig
    from mindlora.plugin import preflight
    folder = tmp_path / "step_20"
    folder.mkdir()
    (folder / "training_state.json").write_text('{"step": 20, "steps_per_epoch": 10}')
    callbacks = [{"type": "LoraCheckpoint", "directory": str(tmp_path), "resume": True}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_runs.tiny_config("unused", 2, callbacks)))
    with pytest.raises(ConfigError, match="step_20 is of the last step of 2 epochs, so nothing is left to resume"):
        preflight.prepare(MindFormerConfig(str(tmp_path / "run.yaml")))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_runs.tiny_config("unused", 3, callbacks)))
    config = MindFormerConfig(str(tmp_path / "run.yaml"))
    preflight.prepare(config)
    assert config.data_skip_steps == 20
