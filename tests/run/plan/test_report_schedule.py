"""Steps and tokens, and rows counted in the index beside a MindRecord."""

import pytest

from mindlora.run.plan.report import schedule_of
from tests.support.planned_runs import run_of


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Two MindRecords with 7 and 6 rows in one folder."""
    import numpy as np
    from mindspore.mindrecord import FileWriter

    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("a.mindrecord", 7), ("b.mindrecord", 6)):
        writer = FileWriter(str(folder / name), shard_num=1)
        writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}}, "rows")
        writer.write_raw_data([{"input_ids": np.ones(17, np.int32)} for _ in range(rows)])
        writer.commit()
    return folder


def data(path, **keys):
    return {"train_dataset": {"data_loader": {"dataset_dir": str(path)}, **keys}}


def test_the_rows_of_a_folder_are_counted_and_the_rest_of_an_epoch_is_dropped(record):
    found = schedule_of(run_of(runner_config={"batch_size": 2, "epochs": 3}, **data(record)))
    assert (found.rows, found.data) == (13, "2 MindRecords")
    assert (found.steps, found.tokens) == (3 * 6, 3 * 6 * 2 * 16)


def test_the_last_batch_counts_where_it_is_not_dropped(record):
    found = schedule_of(run_of(**data(record / "a.mindrecord", drop_remainder=False)))
    assert (found.rows, found.steps) == (7, 4)


def test_a_step_has_the_rows_of_all_micro_batches_and_devices(record):
    nodes = {"use_parallel": True, "parallel": {"parallel_mode": 0}, "parallel_config": {"data_parallel": 2}}
    runner = {"batch_size": 2, "epochs": 2, "gradient_accumulation_steps": 3}
    found = schedule_of(run_of(runner_config=runner, **nodes, **data(record, drop_remainder=True)))
    assert (found.rows_per_step, found.tokens_per_step, found.steps) == (12, 192, 2)


def test_rows_that_cannot_be_counted_are_said(record, tmp_path):
    (tmp_path / "c.mindrecord").write_bytes((record / "a.mindrecord").read_bytes())
    (tmp_path / "d.mindrecord").write_bytes(b"x")
    (tmp_path / "d.mindrecord.db").write_bytes(b"not a database")
    for path, why in (
        (tmp_path / "c.mindrecord", "c.mindrecord has no readable index"),
        (tmp_path / "d.mindrecord", "d.mindrecord has no readable index"),
        (tmp_path / "gone", "gone holds no MindRecord"),
    ):
        found = schedule_of(run_of(**data(path)))
        assert found.rows is found.steps is found.tokens is None and why in found.data
    assert schedule_of(run_of()).data == "the YAML names no data: pass --train_dataset_dir"


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_of_preferences_is_two_rows_of_the_model_unless_it_is_packed(packed, tmp_path):
    import numpy as np

    from mindlora.data.mindrecord import write_mindrecord

    path = str(tmp_path / "pairs.mindrecord")
    tokens = np.ones(17 if packed else (2, 17), np.int32)
    columns = {**dict.fromkeys(("input_ids", "labels", "answers"), tokens), "pairs": np.ones(1, np.int32)}
    write_mindrecord(iter([columns] * 4), path)
    loader = {"train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": path}}}
    wrapper = {"type": "LoraTrainOneStepCell", "preference": {"loss": "dpo"}}
    found = schedule_of(run_of(runner_wrapper=wrapper, runner_config={"batch_size": 2, "epochs": 1}, **loader))
    assert (found.rows_per_step, found.steps, found.tokens_per_step) == (2, 2, 2 * 16 * (1 if packed else 2))


def test_counting_changes_no_file(record):
    before = {path.name: path.stat().st_mtime_ns for path in record.iterdir()}
    schedule_of(run_of(**data(record)))
    assert {path.name: path.stat().st_mtime_ns for path in record.iterdir()} == before
