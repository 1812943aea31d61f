"""Trackers with wandb, SwanLab, MLflow and TensorBoard as they are, side by side and without a network.

One process trains beside MindSpore in an environment that has all of them, and reads what they wrote with their own
readers (wandb's with SwanLab's, which imports it).
"""

import json
import os
import subprocess

import pytest

from mindlora.training.report.history import read_history
from tests.conftest import ROOT
from tests.support.event_files import scalars_of
from tests.support.peers.peer import python_of

CONFIGURATION = {"optimizer": {"type": "AdamW", "betas": [0.9, 0.95]}, "seed": 7, "load_checkpoint": ""}
EVENT = "The loss is high."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the process has trained."""
    python = python_of("MINDLORA_TRACKERS_PYTHON", "the trackers", "tests/trackers")
    folder = tmp_path_factory.mktemp("trackers")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "SWANLAB_MODE": "offline", "WANDB_TAGS": "not these"}
    offline |= {"MLFLOW_TRACKING_URI": "sqlite:///tracked.db", "MLFLOW_EXPERIMENT_NAME": "of the environment"}
    offline |= {"SWANLAB_PROJ_NAME": "of-the-environment", "PYTHONPATH": ROOT}
    command = [python, "-m", "tests.support.tracked_runs", str(folder)]
    run = subprocess.run(
        command, cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "WARNING - wandb" not in run.stderr + run.stdout and "does not take the run" not in run.stderr + run.stdout
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What each tracker has: a list of its runs, the first and its resumption first."""
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorded(folder):
    """What metrics.jsonl has of the first run: the losses, and the others, by name and step."""
    history = read_history(str(folder / "run"))
    names = ("loss", "memory_bytes")
    steps = {(name, record["step"]): record[name] for record in history.steps for name in names}
    return {**steps, **{("held_out_loss", record["step"]): record["held_out_loss"] for record in history.held_out}}


def test_what_the_runs_are_called_is_kept(folder, found):
    ids = json.loads((folder / "run" / "trackers.json").read_text(encoding="utf-8"))
    assert ids["tensorboard"] == "tensorboard"
    for name, key in (("wandb", "id"), ("swanlab", "id"), ("mlflow", "id")):
        assert ids[name] == found[name][0][key]
        assert found[name][0]["name"] == "first"
    # A resumed run is the same run, of which there are two files offline.
    assert found["wandb"][1]["id"] == ids["wandb"] and found["swanlab"][1]["id"] == ids["swanlab"]
    assert len(found["mlflow"]) == 3


def test_ctrl_c_stays_mindloras(found):
    assert found["took_interrupts"] is False


def test_wandb(found, recorded):
    first, resumed, *adapters = found["wandb"]
    large, small = sorted(adapters, key=lambda run: run["name"])
    assert first["project"] == "mindlora" and first["tags"] == ["tiny", "cpu"]
    assert first["config"]["configuration"] == CONFIGURATION and first["config"]["machine"]["device"] == "CPU"
    rows = [*(row for row in first["rows"] if row["step"] <= 2), *resumed["rows"]]
    values = {(name, row["step"]): value for row in rows for name, value in row.items()}
    assert {place: values[place] for place in recorded} == recorded
    # What was sent before is not sent again.
    assert min(row["step"] for row in resumed["rows"]) == 3
    assert resumed["alerts"] == [["guard at step 4", EVENT]]
    assert any(name.startswith("answers/") for name, step in values)
    assert f"report-{first['id']}" in resumed["artifacts"] and resumed["exit_code"] == 0
    assert [run["name"] for run in (small, large)] == ["small", "large"] and small["id"] != large["id"]
    assert [[row["loss"] for row in run["rows"]] for run in (small, large)] == [[3.0, 2.5]] * 2
    assert {(run["group"], run["project"]) for run in (small, large)} == {("swept", "several")}
    assert first["group"] == ""


def test_swanlab(found, recorded):
    first, resumed, shared = found["swanlab"]
    assert first["project"] == "of-the-environment" and first["tags"] == ["tiny", "cpu"]
    assert "type: AdamW" in first["config"] and "device: CPU" in first["config"]
    scalars = [*(each for each in first["scalars"] if each[1] <= 2), *resumed["scalars"]]
    values = {(name, step): value for name, step, value in scalars}
    assert {place: values[place] for place in recorded} == recorded
    media = {name: (step, texts) for name, step, texts in resumed["media"]}
    assert media["events/guard"] == (4, [EVENT]) and media["answers"] == (5, ["**Who?**\n\nA model."])
    assert media["report"][0] == 5 and media["report"][1][0].startswith("<!DOCTYPE html>")
    # It has one run for all adapters.
    values = {(name, step): value for name, step, value in shared["scalars"]}
    assert [values[name, step] for name in ("small/loss", "large/loss") for step in (1, 2)] == [3.0, 2.5] * 2
    assert shared["name"] == "swept" and "small:" in shared["config"] and "large:" in shared["config"]
    assert {name for name, _, _ in shared["media"]} == {"small/report", "large/report"}


def test_mlflow(found, recorded):
    first, *adapters = found["mlflow"]
    # They began at about the same time.
    large, small = sorted(adapters, key=lambda run: run["name"])
    assert first["experiment"] == "of the environment" and first["status"] == "FINISHED"
    assert first["parameters"] == {"optimizer.type": "AdamW", "optimizer.betas": "[0.9, 0.95]", "seed": "7"}
    values = {(name, step): value for name, points in first["metrics"].items() for step, value in points}
    assert {place: values[place] for place in recorded} == recorded
    assert first["tags"]["tiny"] == first["tags"]["cpu"] == "true"
    assert first["artifacts"] == [
        *("answers/step_5.md", "configuration/step_0.yaml", "configuration/step_2.yaml"),
        *("events/step_4_1_guard.txt", "report.html"),
    ]
    assert [run["name"] for run in (small, large)] == ["small", "large"]
    assert {(run["tags"]["group"], run["experiment"]) for run in (small, large)} == {("swept", "several")}
    assert small["metrics"]["loss"] == large["metrics"]["loss"] == [[1, 3.0], [2, 2.5]]


def test_tensorboard(folder, recorded):
    scalars = scalars_of(folder / "run" / "tensorboard")
    assert {place: scalars[place] for place in recorded} == pytest.approx(recorded, rel=1e-6)
    assert scalars_of(folder / "swept" / "large" / "tensorboard")["loss", 2] == 2.5
