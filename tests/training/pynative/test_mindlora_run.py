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


@pytest.mark.parametrize(
    "changes, flags, message",
    [
        ({}, [], "is a YAML of MindFormers' PyNative Trainer. Add --mode 1"),
        ({}, ["--mode", "1", "--epochs", "3"], "--epochs has no meaning for MindFormers' PyNative Trainer."),
        ({}, ["--mode", "1", "--training.step.x", "3"], "'step' is not a key of training"),
        ({"lora_config": None}, ["--mode", "1"], "The YAML has no lora_config"),
        ({"run_mode": "predict"}, ["--mode", "1"], "run_mode is 'predict'"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(tmp_path, capsys, changes, flags, message):
    config = {"training": {"steps": 1}, "lr_scheduler": {}, "lora_config": LORA, **changes}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")

    assert launcher.main(["--config", str(path), *flags]) == 1

    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
