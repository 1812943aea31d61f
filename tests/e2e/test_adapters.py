"""mindlora-run with several adapters on a Qwen3: each is what a run with it alone makes of it, also beside one that
diverges.

One of them has data of its own, which is shorter, so that its run ends while the others go on.
"""

import json
import shutil

import numpy as np
import pytest

from mindlora.training.report.history import read_history
from tests.support import mcore_pynative_run, tiny_runs
from tests.support.mcore_networks import tiny_config
from tests.support.runs import files, succeeded
from tests.support.what_runs import shows

PET = {"lora_rank": 8, "lora_alpha": 12, "lora_dropout": 0.0, "target_modules": ["linear_qkv", "linear_fc2"]}
STEPS = {"plain": 30, "other": 20}
ADAPTERS = {
    "plain": {"learning_rate": 1.0e-2, "seed": 1},
    "other": {
        "learning_rate": 3.0e-3,
        "lora_rank": 3,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["linear_qkv", "linear_proj"],
        "data": "short.mindrecord",
    },
    "diverges": {"learning_rate": 1.0e25, "seed": 3},
}
# What they save after the step at which the run is resumed.
LATER = {"plain": (24, 30), "other": (20,)}


def config(folder, adapters=None, **changes):
    """A run of 5 epochs with shuffled data, weight decay, clipping, held-out rows and a guard."""
    callbacks = [
        {"type": "HeldOutLoss", "dataset_dir": str(folder / "held_out.mindrecord"), "every_steps": 6, "batch_size": 4},
        {"type": "TrainingGuard", "max_rollbacks": 1, "max_skipped": 2},
        {"type": "LoraCheckpoint", "save_steps": 12, "best_metric": "held_out_loss"},
    ]
    yaml = tiny_config(str(folder / "train.mindrecord"), 5, callbacks, {**PET, **changes})
    yaml["train_dataset"]["data_loader"]["shuffle"] = True
    yaml["optimizer"]["weight_decay"] = 0.01
    if adapters:
        nodes = [{"name": name, **own} for name, own in adapters.items()]
        nodes[1]["data"] = str(folder / nodes[1]["data"])
        yaml["model"]["model_config"]["pet_config"]["adapters"] = nodes
    return yaml


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    """The output of a run with three adapters, and of runs with two of them alone, which compile no graph."""
    folder = tmp_path_factory.mktemp("adapters")
    tiny_runs.write_data(folder / "train.mindrecord", 24)
    tiny_runs.write_data(folder / "short.mindrecord", 16, seed=5)
    tiny_runs.write_data(folder / "held_out.mindrecord", 10, seed=3)
    succeeded(tiny_runs.launch(config(folder, ADAPTERS), folder / "several"))
    for name in ("plain", "other"):
        own = dict(ADAPTERS[name])
        rate, data = own.pop("learning_rate"), own.pop("data", "train.mindrecord")
        alone = config(folder, **own)
        alone["lr_schedule"]["learning_rate"] = rate
        alone["train_dataset"]["data_loader"]["dataset_dir"] = str(folder / data)
        succeeded(tiny_runs.launch(alone, folder / name, mcore_pynative_run.SCRIPT))
    return folder


@pytest.mark.parametrize("name", ["plain", "other"])
@shows("several", "qwen3")
def test_each_adapter_learns_what_it_learns_alone(folder, name):
    alone, beside = (tiny_runs.losses(output) for output in (folder / name, folder / "several" / name))
    assert len(alone) == STEPS[name] and alone.keys() == beside.keys()
    np.testing.assert_allclose(list(beside.values()), list(alone.values()), rtol=1e-6)
    histories = [read_history(str(output)) for output in (folder / name, folder / "several" / name)]
    for series, tolerance in (("held_out_loss", 1e-6), ("gradient_norm", 1e-5), ("tokens", 0), ("learning_rate", 1e-6)):
        expected, measured = (history.series(series) for history in histories)
        np.testing.assert_allclose(measured, expected, rtol=tolerance, err_msg=series)


@pytest.mark.parametrize("name, step", [("plain", 12), ("plain", 30), ("other", 12), ("other", 20)])
@shows("several", "qwen3")
def test_what_is_saved_of_an_adapter_is_what_a_run_alone_saves(folder, name, step):
    saved = [output / "lora_checkpoint" / f"step_{step}" for output in (folder / name, folder / "several" / name)]
    alone, beside = map(tiny_runs.state, saved)
    assert alone.keys() == beside.keys()
    for key, array in alone.items():
        tolerance = 1e-6 if "lora" in key and "adam" not in key else 5e-6
        np.testing.assert_allclose(beside[key], array, rtol=0, atol=tolerance * np.abs(array).max(), err_msg=key)
    settings = [json.loads((path / "adapter_config.json").read_text(encoding="utf-8")) for path in saved]
    assert settings[0] == settings[1]
    best = [json.loads((path.parent / "best" / "best.json").read_text(encoding="utf-8")) for path in saved]
    assert best[0]["step"] == best[1]["step"]


@pytest.fixture(scope="module")
def resumed(folder):
    """The run with three adapters as if killed after step 12, when one of them had been stopped, and resumed."""
    shutil.copytree(folder / "several", folder / "resumed")
    for name, steps in LATER.items():
        for step in steps:
            shutil.rmtree(folder / "resumed" / name / "lora_checkpoint" / f"step_{step}")
    yaml = config(folder, ADAPTERS)
    yaml["callbacks"][-1]["resume"] = True
    succeeded(tiny_runs.launch(yaml, folder / "resumed"))
    return folder / "resumed"


def test_a_resumed_run_is_the_same_run(folder, resumed):
    for name, steps in LATER.items():
        whole, again = tiny_runs.losses(folder / "several" / name), tiny_runs.losses(resumed / name)
        assert list(again) == list(range(1, STEPS[name] + 1)) and again == whole
        assert read_history(str(resumed / name)).runs[-1]["step"] == 12
        saved = [output / name / "lora_checkpoint" for output in (folder / "several", resumed)]
        for step in steps:
            tiny_runs.assert_same_state(*(path / f"step_{step}" for path in saved))
            states = [(path / f"step_{step}" / "training_state.json").read_bytes() for path in saved]
            assert states[0] == states[1]
        adapters = [(path / "best" / "adapter_model.safetensors").read_bytes() for path in saved]
        assert adapters[0] == adapters[1]
        assert (saved[0] / "best" / "best.json").read_bytes() == (saved[1] / "best" / "best.json").read_bytes()
    assert (folder / "several" / "comparison.json").read_bytes() == (resumed / "comparison.json").read_bytes()


def test_one_that_had_been_stopped_stays_as_it_was(folder, resumed):
    assert (folder / "several" / "adapters.json").read_bytes() == (resumed / "adapters.json").read_bytes()
    record = json.loads((resumed / "adapters.json").read_text(encoding="utf-8"))["adapters"]
    assert record[0]["ended"] is None and record[1]["ended"] == {"step": 20, "reason": ""}
    assert "ended the run at step" in record[2]["ended"]["reason"]
    outputs = [output / "diverges" for output in (folder / "several", resumed)]
    assert files(outputs[0]) == files(outputs[1])
    assert (outputs[0] / "metrics.jsonl").read_bytes() == (outputs[1] / "metrics.jsonl").read_bytes()


def test_one_that_diverges_is_stopped_and_the_others_go_on(folder):
    history = read_history(str(folder / "several" / "diverges"))
    assert [event["event"] for event in history.events][-1] == "divergence"
    assert len(history.steps) < 20 and STEPS["plain"] == len(read_history(str(folder / "several" / "plain")).steps)
    # What is saved of it is the last good state.
    assert (folder / "several" / "diverges" / "lora_checkpoint").is_dir()
