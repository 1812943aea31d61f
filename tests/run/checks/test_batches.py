"""Data with too few rows for a step: what a step takes of them in each parallel mode, and what each device gets."""

import contextlib
import sqlite3

import pytest

from mindlora.core.errors import ConfigError
from mindlora.core.yaml_file import merged
from mindlora.run.checks.batches import check_batches, pynative_rows_left_out, rows_left_out
from mindlora.run.checks.finding import errors
from mindlora.run.checks.pynative import check_pynative
from mindlora.run.plan.report import plan_of
from mindlora.run.yaml_run import YamlRun


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Returns a function that makes a MindRecord of so many rows, of which the index alone is read."""
    for name in ("RANK_SIZE", "MS_WORKER_NUM", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def make(rows):
        path = tmp_path / f"{rows}.mindrecord"
        path.touch()
        with contextlib.closing(sqlite3.connect(f"{path}.db")) as index:
            index.execute("CREATE TABLE IF NOT EXISTS INDEXES (ROW_ID INTEGER)")
            index.execute("DELETE FROM INDEXES")
            index.executemany("INSERT INTO INDEXES VALUES (?)", [(number,) for number in range(rows)])
            index.commit()
        return str(path)

    return make


def found(path, config=None, num_samples=None):
    """Returns the findings about a training run of 4 rows a batch."""
    loader = {"type": "MindDataset", "dataset_dir": path, "num_samples": num_samples}
    run = {
        "run_mode": "finetune",
        "runner_config": {"batch_size": 4, "epochs": 1, "sink_mode": False},
        "train_dataset": {"data_loader": loader},
        "model": {"model_config": {}},
    }
    return list(check_batches(YamlRun(merged(run, config or {}))))


def parallel(**parallel_config):
    return {"use_parallel": True, "parallel_config": parallel_config}


SHARED = {"parallel": {"full_batch": False, "dataset_strategy": [[2, 1]]}}
CASES = {
    # What changes in the YAML, rows that do not suffice, rows that do, and what a step needs.
    "alone": ({}, 3, 4, "4 (runner_config.batch_size 4)"),
    "accumulation": (
        {"runner_config": {"gradient_accumulation_steps": 3}},
        *(11, 12, "12 (runner_config.batch_size 4 x runner_config.gradient_accumulation_steps 3)"),
    ),
    "data sinking": (
        {"runner_config": {"sink_mode": True, "sink_size": 4, "epochs": 2}},
        *(7, 8, "8 (runner_config.batch_size 4 x runner_config.sink_size 2)"),
    ),
    "semi-auto, all rows on each device": (
        parallel(data_parallel=2, model_parallel=4),
        *(7, 8, "8 (runner_config.batch_size 4 x parallel_config.data_parallel 2)"),
    ),
    "semi-auto and accumulation": (
        {**parallel(data_parallel=2), "runner_config": {"gradient_accumulation_steps": 2}},
        *(15, 16, "x runner_config.gradient_accumulation_steps 2 x parallel_config.data_parallel 2)"),
    ),
    "pipeline": (
        parallel(data_parallel=2, pipeline_stage=2, micro_batch_num=3),
        *(23, 24, "24 (runner_config.batch_size 4 x parallel_config.micro_batch_num 3 x parallel_config.data_par"),
    ),
    "interleaved micro-batches": (
        {**parallel(data_parallel=2), "micro_batch_interleave_num": 2},
        *(15, 16, "x micro_batch_interleave_num 2 x parallel_config.data_parallel 2)"),
    ),
    # MindSpore gives each share as many rows, the first ones twice if need be: 7 rows are 4 for each of 2.
    "semi-auto, rows of its own on each device": (
        {**parallel(data_parallel=2), **SHARED},
        *(6, 7, "8 (runner_config.batch_size 4 x parallel_config.data_parallel 2)"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_without_a_step_is_an_error_with_the_numbers(data, name):
    changes, too_few, enough, needed = CASES[name]
    (finding,) = errors(found(data(too_few), changes))
    assert f"train_dataset has {too_few} rows, but a step needs " in finding.found and needed in finding.found
    assert finding.advice.endswith("or give more data.") and "batch_size" in finding.advice
    assert found(data(enough), changes) == []


@pytest.mark.parametrize("variable", ["RANK_SIZE", "MS_WORKER_NUM", "OMPI_COMM_WORLD_SIZE"])
def test_data_parallel_runs_share_the_rows_by_devices(data, monkeypatch, variable):
    changes = {**parallel(data_parallel=1), "parallel": {"parallel_mode": 0}}
    monkeypatch.setenv(variable, "3")
    (finding,) = found(data(9), changes)
    assert finding.severity == "error"
    assert "9 rows, but a step needs 12 (runner_config.batch_size 4 x the number of devices 3)" in finding.found
    assert found(data(10), changes) == []


def test_before_a_data_parallel_run_is_launched_too_few_rows_for_a_server_are_a_warning(data):
    changes = {**parallel(), "parallel": {"parallel_mode": 0}}
    (finding,) = found(data(24), changes)
    assert finding.severity == "warning" and "a step needs 32" in finding.found and "devices 8" in finding.found
    assert found(data(25), changes) == []
    (finding,) = found(data(3), changes)
    assert finding.severity == "error" and "a step needs 4 " in finding.found


def test_num_samples_counts_and_is_shared_too(data):
    assert found(data(100), num_samples=4) == []
    assert "has 3 rows" in found(data(100), num_samples=3)[0].found
    changes = {**parallel(data_parallel=2), **SHARED}
    assert found(data(100), changes, num_samples=8) == []
    assert "has 7 rows" in found(data(100), changes, num_samples=7)[0].found


def test_a_last_batch_that_is_kept_may_be_smaller(data):
    assert found(data(3), {"train_dataset": {"drop_remainder": False}}) == []


def left_out(path, **changes):
    loader = {"type": "MindDataset", "dataset_dir": path}
    run = {
        "runner_config": {"batch_size": 4, "gradient_accumulation_steps": 2},
        "train_dataset": {"data_loader": loader},
        "model": {"model_config": {}},
    }
    return list(rows_left_out(YamlRun(merged(run, changes))))


def test_rows_that_an_epoch_leaves_out_are_named_with_what_a_step_takes(data):
    (sentence,) = left_out(data(19))
    assert sentence == (
        "train_dataset: each epoch leaves out 3 of 19 rows (drop_remainder): a step takes runner_config.batch_size 4 x "
        "runner_config.gradient_accumulation_steps 2."
    )
    assert left_out(data(16)) == left_out(data(19), train_dataset={"drop_remainder": False}) == []
    assert left_out("nowhere.mindrecord") == []
    loader = {"data_loader": {"num_samples": 17}}
    assert "leaves out 1 of 17 rows" in left_out(data(19), train_dataset=loader)[0]
    own = {"model": {"model_config": {"pet_config": {"adapters": [{"data": data(9)}]}}}}
    assert left_out(data(19), **own)[0].startswith("model.model_config.pet_config.adapters[0].data: each epoch leaves")


def test_data_parallel_runs_leave_out_rows_by_devices(data, monkeypatch):
    monkeypatch.setenv("RANK_SIZE", "2")
    (sentence,) = left_out(data(35), **{**parallel(), "parallel": {"parallel_mode": 0}})
    assert "leaves out 3 of 35 rows" in sentence and sentence.endswith("x the number of devices 2.")


def test_data_of_each_adapter_is_counted_and_that_of_the_run_where_one_reads_it(data):
    own = [{"name": "a", "data": data(3)}, {"name": "b", "data": data(5)}]
    pet = {"model": {"model_config": {"pet_config": {"adapters": own}}}}
    (finding,) = found(data(2), pet)
    assert finding.found.startswith("model.model_config.pet_config.adapters[0].data has 3 rows, but a step needs 4")
    del own[0]["data"]
    (finding,) = found(data(2), pet)
    assert finding.found.startswith("train_dataset has 2 rows")


def test_data_to_evaluate_on_is_counted_too(data):
    evaluated = {"eval_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": data(3)}}}
    (finding,) = found(data(4), {**evaluated, "do_eval": True})
    assert finding.found.startswith("eval_dataset has 3 rows, but a step needs 4")
    assert found(data(4), evaluated) == []
    held_out = [{"type": "HeldOutLoss", "dataset_dir": data(0)}]
    (finding,) = found(data(4), {"callbacks": held_out})
    assert finding.found.startswith("callbacks.HeldOutLoss: ") and finding.found.endswith("0.mindrecord has no rows.")


def test_plan_refuses_such_a_run(data):
    config = {
        "run_mode": "finetune",
        "runner_config": {"batch_size": 4, "epochs": 1},
        "train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": data(3)}},
        "model": {"arch": {"type": "LlamaForCausalLM"}, "model_config": {"type": "LlamaConfig"}},
    }
    config["model"]["model_config"].update(
        seq_length=16, hidden_size=32, num_layers=1, num_heads=4, vocab_size=64, intermediate_size=64
    )
    with pytest.raises(ConfigError, match="train_dataset has 3 rows, but a step needs 4"):
        plan_of(config, "x", None, (1,))


def test_the_pynative_trainer_needs_the_rows_of_a_micro_batch(data):
    def findings(rows):
        loader = {"type": "MindDataset", "dataset_files": [data(rows)]}
        config = {"training": {"local_batch_size": 4}, "train_dataset": {"dataloader": loader}, "model": {}}
        return errors(check_pynative(config))

    (finding,) = findings(3)
    assert "train_dataset has 3 rows, but a micro-batch needs 4 (training.local_batch_size)." in finding.found
    assert findings(4) == []


def test_the_pynative_trainer_leaves_out_what_fills_no_micro_batch(data):
    def sentences(rows, shares=1, micro_batches=1, **dataset):
        loader = {"type": "MindDataset", "dataset_files": [data(rows)]}
        config = {
            "training": {"local_batch_size": 4},
            "parallelism": {"data_parallel": shares},
            "train_dataset": {"dataloader": loader, **dataset},
        }
        return list(pynative_rows_left_out(config, micro_batches))

    (sentence,) = sentences(7)
    assert sentence.startswith("train_dataset: each epoch leaves out 3 of 7 rows (drop_remainder): MindFormers reads ")
    assert sentence.endswith("training.local_batch_size 4.")
    (sentence,) = sentences(11, shares=2)
    assert "leaves out 3 of 11 rows" in sentence and sentence.endswith("size 4 x parallelism.data_parallel 2.")
    (sentence,) = sentences(14, micro_batches=3)
    assert "leaves out 2 of 14 rows" in sentence and sentence.endswith("size 4 x micro-batches 3.")
    # Each of two shares has four of seven rows: one is read twice.
    assert sentences(7, shares=2) == sentences(8) == sentences(7, drop_remainder=False) == []
