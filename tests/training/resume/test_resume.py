"""Runs in their own processes: what a kill leaves of one, once resumed, equals the uninterrupted one, bit for bit."""

import json
import pathlib
import types

import pytest

from mindlora.files.adapters import files as adapter_files
from mindlora.training.report.history import read_history
from tests.support import tiny_runs
from tests.support.scripted_runs import folders
from tests.support.what_runs import shows


class Run:
    """A configuration of the tiny LoRA run, and its folders."""

    def __init__(self, folder, rows, epochs, mode, scale_sense, checkpoint, **pet):
        self.folder, self.mode, self.pet = folder, mode, pet
        self.data, self.held_out = str(folder / "train.mindrecord"), str(folder / "heldout.mindrecord")
        tiny_runs.write_data(self.data, rows)
        tiny_runs.write_data(self.held_out, 6)
        self.epochs, self.scale_sense, self.checkpoint = epochs, scale_sense, checkpoint

    def start(self, name, script=None, queued=False, **checkpoint):
        """Runs the configuration in a process of its own; returns (process, output folder)."""
        callbacks = [
            {"type": "ProgressBar"},
            {"type": "HeldOutLoss", "dataset_dir": self.held_out, "every_steps": 2},
            {"type": "LoraCheckpoint", "best_metric": "held_out_loss", **self.checkpoint, **checkpoint},
        ]
        config = tiny_runs.tiny_config(self.data, self.epochs, callbacks)
        config["context"]["mode"] = self.mode
        config["model"]["model_config"]["pet_config"].update(self.pet)
        config["runner_wrapper"]["scale_sense"] = self.scale_sense
        config["lr_schedule"]["warmup_ratio"] = 0.3
        # Each step has two micro-batches.
        config["runner_config"].update(batch_size=tiny_runs.BATCH_SIZE // 2, gradient_accumulation_steps=2)
        return tiny_runs.launch(config, self.folder / name, script, queued), self.folder / name


# Copies what kill -9 would leave while it writes step_8: its adapter is written, its training state is not.
COPIED_WHILE_SAVING = """
import shutil, sys
from mindlora.training.resume import training_state
from mindlora.training.launch.launcher import main
save_file = training_state.save_file
def copy_and_save(tensors, path):
    if ".step_8." in path:
        shutil.copytree("uninterrupted", "stopped")
    save_file(tensors, path)
training_state.save_file = copy_and_save
sys.exit(main())
"""


@pytest.fixture(scope="module")
def graph_runs(tmp_path_factory):
    """In graph mode with a dynamic loss scale: an uninterrupted run, what of it a kill leaves, and that one resumed."""
    scale = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 4}
    run = Run(
        tmp_path_factory.mktemp("graph"),
        rows=20,
        epochs=3,
        mode=0,
        scale_sense=scale,
        checkpoint={"save_steps": 2, "keep_last": 99},
    )
    uninterrupted = run.start("uninterrupted", COPIED_WHILE_SAVING)
    left = folders(run.folder / "stopped" / "lora_checkpoint")
    resumed = run.start("stopped", resume=True)
    return types.SimpleNamespace(uninterrupted=uninterrupted, left=left, resumed=resumed)


def test_a_killed_run_leaves_complete_step_folders(graph_runs):
    output = graph_runs.resumed[1]
    assert [name for name in graph_runs.left if not name.startswith(".")] == ["best", "step_2", "step_4", "step_6"]
    assert any(name.startswith(".step_8.") for name in graph_runs.left)
    for step in (2, 4, 6):
        assert set(tiny_runs.state(output / "lora_checkpoint" / f"step_{step}")) == set(
            tiny_runs.state(graph_runs.uninterrupted[1] / "lora_checkpoint" / f"step_{step}")
        )


@shows("resume", "llama")
def test_resumed_in_the_second_epoch_it_equals_the_uninterrupted_run(graph_runs):
    (uninterrupted_process, uninterrupted), (process, resumed) = graph_runs.uninterrupted, graph_runs.resumed
    assert (uninterrupted_process.returncode, process.returncode) == (0, 0), process.stderr[-2000:]
    for step in (8, 10, 12, 14, 15):
        name = pathlib.Path("lora_checkpoint") / f"step_{step}"
        tiny_runs.assert_same_state(uninterrupted / name, resumed / name)
    losses = tiny_runs.losses(uninterrupted)
    assert list(losses) == list(range(1, 16)) and len(set(losses.values())) == 15
    assert tiny_runs.losses(resumed) == losses and read_history(str(resumed)).runs[-1]["step"] == 6
    # The loss scale did change, so that restoring it matters.
    scales = [
        float(tiny_runs.state(uninterrupted / "lora_checkpoint" / f"step_{step}")["scale_sense"]) for step in (2, 6, 15)
    ]
    assert scales == [1024, 2048, 8192]


def test_a_resumed_run_reports_its_place(graph_runs):
    process, _ = graph_runs.resumed
    lines = [line for line in process.stdout.splitlines() if "Epoch:[" in line]
    assert "Epoch:[  2/  3], step:[    2/    5]" in lines[0] and "Epoch:[  3/  3], step:[    5/    5]" in lines[-1]
    assert len(lines) == 9
    places = [line for line in process.stderr.splitlines() if line.startswith("training: ")]
    assert "7/15 steps" in places[0] and "15/15 steps" in places[-1]


def test_best_is_that_of_the_whole_run(graph_runs):
    (_, uninterrupted), (_, resumed) = graph_runs.uninterrupted, graph_runs.resumed
    held_out = dict(zip(*read_history(str(uninterrupted)).series("held_out_loss")))
    assert list(held_out) == [2, 4, 6, 8, 10, 12, 14, 15]
    step, loss = min(held_out.items(), key=lambda point: point[1])
    for output in (uninterrupted, resumed):
        with open(output / "lora_checkpoint" / "best" / "best.json", encoding="utf-8") as file:
            assert json.load(file) == {"step": step, "held_out_loss": loss}


def test_resumed_in_pynative_from_a_named_folder(tmp_path_factory):
    # With every setting that makes cells differ, and with saved modules.
    run = Run(
        tmp_path_factory.mktemp("pynative"),
        rows=12,
        epochs=1,
        mode=1,
        scale_sense=4.0,
        checkpoint={"save_steps": 2, "keep_last": 99},
        use_rslora=True,
        rank_pattern={"w2": 3},
        alpha_pattern={r".*\.wq": 5},
        modules_to_save=["lm_head", "attention_norm"],
    )
    _, uninterrupted = run.start("uninterrupted")
    # As a user's program does: of all forked runs, this one alone queues its operators.
    process, resumed = run.start("resumed", queued=True, resume=str(uninterrupted / "lora_checkpoint" / "step_2"))
    assert process.returncode == 0, process.stderr[-2000:]
    assert folders(resumed / "lora_checkpoint") == ["best", "step_3"]
    adapter = adapter_files.read(str(uninterrupted / "lora_checkpoint" / "step_3"))
    assert {path.rpartition(".")[2]: (adapter.rank(path), adapter.alphas[path]) for path in adapter.paths} == {
        "wq": (8, 5.0),
        "w2": (3, 12.0),
    }
    assert (
        set(adapter.saved_modules) == {"lm_head.weight", "model.layers.0.attention_norm.weight"} and adapter.use_rslora
    )
    first = adapter_files.read(str(uninterrupted / "lora_checkpoint" / "step_2"))
    assert all((first.saved_modules[name] != array).any() for name, array in adapter.saved_modules.items())
    tiny_runs.assert_same_state(uninterrupted / "lora_checkpoint" / "step_3", resumed / "lora_checkpoint" / "step_3")
    assert tiny_runs.losses(resumed) == {3: tiny_runs.losses(uninterrupted)[3]}
