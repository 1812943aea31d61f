"""mindlora-run --mode 1 on a YAML of MindFormers' PyNative Trainer."""

import numpy as np
import pytest
import yaml

from mindlora.training.launch import launcher
from tests.support import pynative_runs
from tests.support.pynative_runs import BRIDGE, LORA, only_with_pynative_trainer

RUN = "tests.support.pynative_mindlora_run"


@only_with_pynative_trainer
def test_it_does_what_mindformers_launcher_does(tmp_path):
    data = tmp_path / "rows.mindrecord"
    pynative_runs.write_data(data, rows=7)
    filled = [{"type": "FillWeights"}]
    bridged = pynative_runs.bridged("qwen3", data, steps=2, callbacks=filled)
    plain = pynative_runs.tiny_config("qwen3", data, steps=9, callbacks=filled)

    theirs = pynative_runs.launch(bridged, tmp_path / "theirs", "--register_path", BRIDGE)
    ours = pynative_runs.launch(plain, tmp_path / "ours", "--mode", "1", "--training.steps", "2", module=RUN)

    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr[-2000:] + ours.stderr[-2000:]
    for said in ("LoRA by mindlora", "each epoch leaves out 3 of 7 rows (drop_remainder): MindFormers reads training."):
        assert said in ours.stdout + ours.stderr
    expected, found = (pynative_runs.trained(tmp_path / name) for name in ("theirs", "ours"))
    assert len(pynative_runs.losses(tmp_path / "ours")) == 2 and found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@only_with_pynative_trainer
def test_resume_goes_on_from_the_newest_step_or_the_named_one(tmp_path):
    data, saved = tmp_path / "rows.mindrecord", tmp_path / "saved"
    pynative_runs.write_data(data, rows=16)
    checkpoint = {"enable_save": True, "save_path": str(saved), "save_interleaved_steps": 1}
    config = pynative_runs.tiny_config("qwen3", data, steps=4, checkpoint=checkpoint)
    stopping = {**config, "callbacks": [{"type": "SendSignal", "step": 3}]}

    def run(name, config, *flags):
        return pynative_runs.launch(config, tmp_path / name, "--mode", "1", *flags, module=RUN)

    stopped = run("stopped", stopping)
    assert stopped.returncode == 143 and "repeat the command of mindlora-run with --resume" in stopped.stderr
    rest = run("rest", config, "--resume")
    again = run("again", config, "--resume", str(saved / "iteration_00000002"))
    assert (rest.returncode, again.returncode) == (0, 0), rest.stderr[-2000:] + again.stderr[-2000:]
    rest, again = (pynative_runs.losses(tmp_path / name) for name in ("rest", "again"))
    assert len(rest) == 1 and len(again) == 2 and again[1:] == rest


@only_with_pynative_trainer
def test_on_a_terminal_there_is_a_progress_bar_alone(tmp_path):
    data = tmp_path / "rows.mindrecord"
    pynative_runs.write_data(data, rows=8)
    config = pynative_runs.tiny_config("qwen3", data, steps=2)
    run = pynative_runs.launch(config, tmp_path / "run", "--mode", "1", "--terminal", module=RUN)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "training: 100%|" in run.stderr and "2/2 steps" in run.stderr
    assert "--verbose prints it here" in run.stdout and "Start training loop" not in run.stdout + run.stderr
    assert "Start training loop" in (tmp_path / "output" / "log" / "screen.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "changes, flags, message",
    [
        ({}, [], "is a YAML of MindFormers' PyNative Trainer. Add --mode 1"),
        ({}, ["--mode", "1", "--epochs", "3"], "--epochs has no meaning for MindFormers' PyNative Trainer."),
        ({}, ["--mode", "1", "--training.step.x", "3"], "'step' is not a key of training"),
        ({"lora_config": None}, ["--mode", "1"], "The YAML has no lora_config"),
        ({"run_mode": "predict"}, ["--mode", "1"], "run_mode is 'predict'"),
        ({}, ["--mode", "1", "--resume"], "checkpoint.save_path is None, where no step is"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(tmp_path, capsys, changes, flags, message):
    config = {"training": {"steps": 1}, "lr_scheduler": {}, "lora_config": LORA, **changes}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")

    assert launcher.main(["--config", str(path), *flags]) == 1

    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
