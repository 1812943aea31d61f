"""Callbacks of mindlora under MindFormers' PyNative Trainer. One process trains all runs: imports are slow."""

import json

import numpy as np
import pytest

from tests.support import pynative_runs
from tests.support.event_files import scalars_of
from tests.support.pynative_runs import only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS = 4
# Callbacks that change the learning rate by what they have seen.
CONTROLS = (
    {"type": "TrainingGuard", "max_skipped": 2},
    {"type": "WarmUp", "steps": 10},
    {"type": "ReduceOnPlateau", "metric": "loss", "every_steps": 1, "patience": 2, "threshold": 0.5, "factor": 0.5},
    {"type": "GradientNormRate", "window": 4, "growth": 0.1},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what ended it, or None."""
    data = folder / "rows.mindrecord"
    pynative_runs.write_data(data, rows=4)
    runs = {
        "measured": (
            *({"type": "Trackers", "report_to": ["tensorboard"], "tags": ["tiny"]}, {"type": "RunReport"}),
            {"type": "AdapterHealth", "every_steps": 2},
            {"type": "HeldOutLoss", "dataset_dir": str(data), "every_steps": 1, "batch_size": 3},
            {"type": "WarmUp", "steps": 2, "start_factor": 0.5},
        ),
        "patient": (
            {"type": "EarlyStopping", "patience": 1, "min_delta": 100.0},
            {"type": "HeldOutLoss", "dataset_dir": str(data), "every_steps": 1},
        ),
        "stopped": ({"type": "GracefulStop"}, {"type": "SendSignal", "step": 2}),
        "guarded": (
            *({"type": "TrainingGuard", "max_skipped": 2}, {"type": "RunReport"}),
            {"type": "SpoilStep", "steps": [2, 3], "path": str(folder / "changed.json")},
        ),
        "waiting": ({"type": "EarlyStopping"},),
        # The guard goes back at step 4, the last before a checkpoint, and the rate changes by all of them after it too.
        "saved": (
            *(*CONTROLS, {"type": "RunReport"}),
            {"type": "SpoilStep", "steps": [3, 4], "path": str(folder / "spoiled.json")},
        ),
        # What EarlyStopping waits for is never measured.
        "resumed": (*CONTROLS, {"type": "RunReport"}, {"type": "EarlyStopping", "metric": "accuracy"}),
    }
    longer = {"training": {"steps": 8, "local_batch_size": 4, "global_batch_size": 4, "seed": 1}}
    saving = {"enable_save": True, "save_path": str(folder / "iterations"), "save_interleaved_steps": 4}
    loading = {"enable_save": False, "load_path": str(folder / "iterations" / "iteration_00000004")}
    checkpoints = {"saved": {**longer, "checkpoint": saving}, "resumed": {**longer, "checkpoint": loading}}
    runs["empty"] = ({"type": "TrainingGuard", "max_skipped": 2}, {"type": "RunReport"}, {"type": "EmptySteps"})
    runs["unlabeled"] = ({"type": "RunReport"},)
    pynative_runs.write_data(folder / "half.mindrecord", rows=8, labeled=4)
    pynative_runs.write_data(folder / "unlabeled.mindrecord", rows=4, labeled=0)
    other_data = {"empty": folder / "half.mindrecord", "unlabeled": folder / "unlabeled.mindrecord"}
    configs = []
    for name, callbacks in runs.items():
        # Where a callback writes to a folder, each run has one.
        first = [] if name == "resumed" else [{"type": "FillWeights"}]
        recorded = [*first, *callbacks, {"type": "RecordLosses"}]
        writing = ("RunReport", "RecordLosses")
        named = [{**node, "directory": str(folder / name)} if node["type"] in writing else node for node in recorded]
        nodes = {"callbacks": named, **checkpoints.get(name, {})}
        configs.append(pynative_runs.tiny_config("qwen3", other_data.get(name, data), STEPS, **nodes))
        configs[-1]["train_dataset"]["dataloader"]["shuffle"] = False
    return dict(zip(runs, pynative_runs.series(configs, folder)))


def records(folder, key):
    """Returns what a run's metrics.jsonl holds under a key, in order."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@shows("held_out", "qwen3", trainer="pynative")
def test_the_held_out_loss_is_mindformers_loss_of_the_next_step(folder, messages):
    assert messages["measured"] is None
    held_out = records(folder / "measured", "held_out_loss")
    losses = pynative_runs.losses(folder / "measured")
    assert len(held_out) == len(losses) == STEPS
    np.testing.assert_allclose(held_out[:-1], losses[1:], rtol=1e-5)
    assert records(folder / "measured", "loss") == pytest.approx(losses)


def test_rates_tokens_and_health_are_recorded(folder, messages):
    np.testing.assert_allclose(records(folder / "measured", "learning_rate"), [0.005, 0.0075, 0.01, 0.01], rtol=1e-5)
    tokens = records(folder / "measured", "tokens")
    assert len(set(tokens)) == 1 and 0 < tokens[0] < 64
    health = records(folder / "measured", "health")
    assert [report["step"] for report in health] == [2, 4]
    for report in health:
        for cell in report["cells"].values():
            assert all(part["gradient_norm"] > 0 and part["update"] > 0 for part in cell["parts"].values())
    assert (folder / "measured" / "report.html").is_file()


def test_trackers_get_what_is_recorded(folder, messages):
    assert messages["measured"] is None
    scalars = scalars_of(folder / "measured" / "tensorboard")
    for name in ("loss", "held_out_loss", "learning_rate"):
        found = [scalars[name, step] for step in range(1, STEPS + 1)]
        assert found == pytest.approx(records(folder / "measured", name), rel=1e-6)
    assert {step for name, step in scalars if name.startswith("health/")} == {2, STEPS}


def test_a_run_ends_early_if_nothing_improves(folder, messages):
    assert messages["patient"] is None
    assert len(pynative_runs.losses(folder / "patient")) == 2


def test_a_callback_that_waits_for_what_nothing_measures_is_refused(messages):
    assert "EarlyStopping needs held_out_loss, which nothing measures" in messages["waiting"]


def test_a_signal_finishes_the_step(folder, messages):
    assert "RunStopped: SIGTERM stopped the run after step 2 of 4. MindFormers saved nothing" in messages["stopped"]
    assert len(pynative_runs.losses(folder / "stopped")) == 2


@shows("guard", "qwen3", trainer="pynative")
def test_a_bad_step_changes_nothing_and_two_lower_the_rate(folder, messages):
    assert messages["guarded"] is None
    assert json.loads((folder / "changed.json").read_text(encoding="utf-8")) == [False, False]
    assert records(folder / "guarded", "skipped") == [False, True, True, False]
    assert records(folder / "guarded", "event") == ["skipped_step", "skipped_step", "rollback"]
    np.testing.assert_allclose(records(folder / "guarded", "learning_rate"), [0.01, 0.01, 0.01, 0.003], rtol=1e-5)
    assert np.isfinite(pynative_runs.losses(folder / "guarded")[3])


def test_a_step_without_a_label_that_counts_changes_nothing_and_is_no_fault(folder, messages):
    assert messages["empty"] is None
    assert records(folder / "empty", "skipped") == [False, True, False, True]
    assert records(folder / "empty", "loss")[1::2] == ["nan"] * 2 and records(folder / "empty", "tokens")[1] == 0
    assert records(folder / "empty", "event") == ["empty_step"] * 2


def test_data_without_a_label_that_counts_is_refused(messages):
    assert "train_dataset: no label of " in messages["unlabeled"]


def test_callbacks_of_a_resumed_run_go_on_where_they_were(folder, messages):
    assert messages["saved"] is messages["resumed"] is None
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("saved", "resumed"))
    assert len(whole) == 8 and resumed == whole[4:]
    whole, resumed = (pynative_runs.trained(folder / name) for name in ("saved", "resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)
    whole, resumed = (records(folder / name, "learning_rate") for name in ("saved", "resumed"))
    assert resumed == whole[4:] and len(set(resumed)) == 4
    assert "rollback" in records(folder / "saved", "event")


def test_a_resumed_run_says_which_callbacks_begin_anew(folder, messages):
    assert records(folder / "resumed", "message")[0] == (
        "The run goes on after step 4, whose checkpoint holds nothing of EarlyStopping: these begin anew. Resume with "
        "the callbacks of the run to continue exactly."
    )
