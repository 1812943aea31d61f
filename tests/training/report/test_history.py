"""metrics.jsonl: strict JSON, readable at any moment, continued by a resumed run; and what a damaged one says."""

import json
import math

import numpy as np
import pytest

from mindlora.core.errors import DataError
from mindlora.training.report.history import HistoryWriter, read_history

HEALTH = {"step": 2, "cells": {"wq": {"change": 0.5}}, "findings": []}


def lines_of(folder, name="metrics.jsonl"):
    """Returns the records of a file; NaN and Infinity, which Python's parser takes, are not JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / name).read_text("utf-8").splitlines()]


def write(folder, steps, start=0):
    writer = HistoryWriter(str(folder), start)
    writer.append(start, run={"seed": 7})
    for step in steps:
        writer.append(step, loss=float(step))
    return writer


def test_every_kind_comes_back(tmp_path):
    writer = write(tmp_path / "new" / "folder", [1])
    writer.append(2, loss=math.nan, gradient_norm=np.float32(np.inf), tokens=np.int64(9), skipped=np.bool_(True))
    writer.append(2, held_out_loss=-math.inf)
    writer.append(2, event="guard", message='a "quoted" line\nand 中文')
    writer.append(2, health=HEALTH)
    writer.append(2, answers=[{"prompt": "p", "answer": "a"}])
    history = read_history(str(tmp_path / "new" / "folder"))  # The file is still open, as in a run that goes on.
    writer.close()
    assert history.runs == [{"step": 0, "run": {"seed": 7}}]
    assert [record["step"] for record in history.steps] == [1, 2] and history.steps[1]["skipped"] is True
    assert history.steps[0]["gradient_norm"] is None
    np.testing.assert_array_equal(history.series("loss"), [[1, 2], [1, math.nan]])
    np.testing.assert_array_equal(history.series("gradient_norm"), [[2], [math.inf]])
    np.testing.assert_array_equal(history.series("tokens"), [[2], [9]])
    np.testing.assert_array_equal(history.series("held_out_loss"), [[2], [-math.inf]])
    assert history.events == [{"step": 2, "event": "guard", "message": 'a "quoted" line\nand 中文'}]
    assert history.health == [{"step": 2, "health": HEALTH}]
    assert history.answers == [{"step": 2, "answers": [{"prompt": "p", "answer": "a"}]}]
    records = lines_of(tmp_path / "new" / "folder")
    assert len(records) == 7 and records[2]["loss"] == "nan" and records[2]["gradient_norm"] == "inf"


def test_a_killed_run_loses_its_last_line_only(tmp_path):
    write(tmp_path, [1, 2, 3]).close()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    last = len(whole.splitlines()[-1])
    for cut in (1, last // 2, last):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:-cut])
        assert read_history(str(tmp_path)).series("loss")[0].tolist() == [1, 2]
    resumed = write(tmp_path, [3], start=2)
    resumed.close()
    assert resumed.moved == 0 and read_history(str(tmp_path)).series("loss")[0].tolist() == [1, 2, 3]
    assert len(lines_of(tmp_path)) == 5  # nothing of the torn line is left


def test_a_resumed_run_continues_the_file(tmp_path):
    write(tmp_path, [1, 2, 3, 4]).close()
    resumed = write(tmp_path, [3, 4, 5], start=2)
    resumed.close()
    assert resumed.moved == 2
    history = read_history(str(tmp_path))
    assert history.series("loss")[0].tolist() == [1, 2, 3, 4, 5] and [run["step"] for run in history.runs] == [0, 2]
    assert lines_of(tmp_path, "metrics_earlier.jsonl") == [{"step": 3, "loss": 3.0}, {"step": 4, "loss": 4.0}]


def test_a_new_run_begins_a_new_file(tmp_path):
    write(tmp_path, [1]).close()
    for again in (2, 3):
        writer = write(tmp_path, [1])
        writer.close()
        assert writer.moved == 2 and len(lines_of(tmp_path, "metrics_earlier.jsonl")) == 2 * (again - 1)
        assert len(lines_of(tmp_path)) == 2


def test_what_is_added_after_the_end_is_in_order(tmp_path):
    write(tmp_path, [1, 2]).close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "los')  # by a kill
    writer = HistoryWriter(str(tmp_path), None)
    writer.append(2, held_out_loss=1.0)
    writer.append(0, held_out_loss=3.0)
    writer.close()
    history = read_history(str(tmp_path))
    np.testing.assert_array_equal(history.series("held_out_loss"), [[0, 2], [3, 1]])
    assert writer.moved == 0 and history.series("loss")[0].tolist() == [1, 2]


def test_a_folder_without_a_history_is_named(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path} has no metrics.jsonl: name the output folder of a training run"):
        read_history(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "ru')
    with pytest.raises(DataError, match="metrics.jsonl holds no complete record: the run has not begun"):
        read_history(str(tmp_path))


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense", "line 2 is not JSON"),
        ("[1]", "line 2 holds a list instead of a JSON object"),
        ('{"loss": 1.0}', "line 2 is not a record of a training run: .* its keys are loss. Remove the line."),
        ('{"step": -1, "loss": 1.0}', "line 2 is not a record"),
        ('{"step": true, "loss": 1.0}', "line 2 is not a record"),
        ('{"step": 1, "loss": 1.0, "event": "x"}', "line 2 is not a record"),
        ('{"step": 1, "other": 1.0}', "its keys are step, other"),
        ('{"step": 1, "loss": "low"}', "line 2: loss is 'low', but it must be a number"),
        ('{"step": 1, "loss": 1.0, "tokens": [3]}', r"tokens is \[3\], but it must be a number"),
        ('{"step": 1, "held_out_loss": false}', "held_out_loss is False"),
        ('{"step": 1, "event": "guard"}', "line 2: event does not hold what RunReport writes there"),
        ('{"step": 1, "health": 3}', "health does not hold"),
        ('{"step": 1, "health": {"cells": {}}}', "health does not hold"),
        ('{"step": 1, "answers": [{"prompt": "p"}]}', "answers does not hold"),
        ('{"step": 1, "evaluation": {"verdicts": []}}', "evaluation does not hold"),
        ('{"step": 1, "forgetting": "much"}', "forgetting is 'much'"),
        ('{"step": 1, "run": []}', "run does not hold"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 1.0}}\n{line}\n{{"step": 2, "loss": 1.0}}\n')
    with pytest.raises(DataError, match=message):
        read_history(str(tmp_path))
    with pytest.raises(DataError, match=message):
        HistoryWriter(str(tmp_path), 1)
