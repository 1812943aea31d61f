"""The list of training runs: states as files tell them, figures, and folders that cannot be listed."""

import os

import pytest

from mindlora.core.errors import DataError
from mindlora.training.report.history import HistoryWriter
from mindlora.training.report.run_list import list_runs
from tests.support.histories import description, step_record, write_history

# When the last of these histories was written; the steps of all are 2.5 s apart.
WRITTEN = 1e9 + 100


def write_part(folder, done=10, steps=40, begins=(0,), event=None):
    """Writes the history of a run that is not at its end: (kind, message) of an event after the last step."""
    for begin in begins:
        writer = HistoryWriter(str(folder), begin)
        writer.append(begin, run=description(steps))
        for step in range(begin + 1, done + 1):
            writer.append(step, **step_record(step, steps))
        if event is not None and begin == begins[0]:
            writer.append(done, event=event[0], message=event[1])
        writer.close()
    os.utime(folder / "metrics.jsonl", (WRITTEN, WRITTEN))


def listed(folder, later=1.0):
    """Returns the only run below a folder, some seconds after it has been written."""
    (run,) = list_runs(str(folder), WRITTEN + later).runs
    return run


def test_a_finished_run_with_its_figures(tmp_path):
    write_history(tmp_path / "run", steps=40)
    os.utime(tmp_path / "run" / "metrics.jsonl", (WRITTEN, WRITTEN))
    run = listed(tmp_path)
    assert (run.state, run.step, run.steps, run.written) == ("finished", 40, 40, WRITTEN)
    assert run.loss == step_record(40, 40)["loss"]
    assert (run.held_out_loss, run.held_out_step) == (pytest.approx(1.2 + 3 * 2.718281828**-3), 40)


@pytest.mark.parametrize(
    "kind, message, state",
    [
        ("stop", "SIGINT stopped the run after step 10 of 40.", "stopped"),
        ("early_stop", "EarlyStopping: held_out_loss has not improved. The run ends.", "finished"),
        ("budget", "ForgettingBudget: the budget is 0.1, and the run ends.", "finished"),
        ("budget", "ForgettingBudget: the budget is 0.1; from now on the rate is lower.", "running"),
        ("divergence", "TrainingGuard ended the run at step 10.", "failed"),
        ("rollback", "TrainingGuard: the loss is NaN.", "running"),
    ],
)
def test_events_that_end_a_run(tmp_path, kind, message, state):
    write_part(tmp_path / "run", event=(kind, message))
    assert listed(tmp_path).state == state


def test_a_run_that_goes_on_and_one_that_is_silent(tmp_path):
    write_part(tmp_path / "run")
    assert [listed(tmp_path, later).state for later in (1, 299, 301)] == ["running", "running", "silent"]
    # One that compiles is given more time.
    write_part(tmp_path / "run", done=0)
    assert [listed(tmp_path, later).state for later in (301, 1801)] == ["running", "silent"]
    assert (listed(tmp_path).step, listed(tmp_path).loss) == (0, None)


def test_a_resumed_run_is_no_longer_stopped(tmp_path):
    write_part(tmp_path / "run", done=10, begins=(0, 10), event=("stop", "SIGTERM stopped the run."))
    assert listed(tmp_path).state == "running"


def test_a_run_failed_if_it_left_a_traceback_and_not_if_an_earlier_one_did(tmp_path):
    write_part(tmp_path / "run")
    traceback = tmp_path / "run" / "log" / "rank_1" / "traceback.txt"
    traceback.parent.mkdir(parents=True)
    traceback.write_text("RuntimeError")
    for time, state in ((1e9 + 50, "failed"), (1e9 - 50, "running")):
        os.utime(traceback, (time, time))
        assert listed(tmp_path).state == state


def test_a_run_that_cannot_be_read_is_listed_with_the_reason_beside_the_others(tmp_path):
    write_part(tmp_path / "b" / "run")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1}\n')
    found = list_runs(str(tmp_path), WRITTEN + 1)
    assert [(os.path.relpath(run.path, tmp_path), run.state) for run in found.runs] == [
        ("a", "unreadable"),
        (os.path.join("b", "run"), "running"),
    ]
    assert "line 1 is not a record of a training run" in str(found).replace("\n", " ")


def test_the_table_says_it_in_a_line_each(tmp_path):
    write_history(tmp_path / "first", steps=40)
    write_part(tmp_path / "second", done=3)
    for name in ("first", "second"):
        os.utime(tmp_path / name / "metrics.jsonl", (WRITTEN, WRITTEN))
    titles, first, second = str(list_runs(str(tmp_path), WRITTEN + 1)).splitlines()
    assert titles.split("  ")[0] == "run" and titles.endswith("last written (UTC)")
    assert first.split() == [
        *("first", "finished", "40", "of", "40", f"{step_record(40, 40)['loss']:.4g}"),
        *("1.349", "at", "step", "40", "2001-09-09", "01:48"),
    ]
    assert second.split()[:5] == ["second", "running", "3", "of", "40"] and second.split()[6] == "-"


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(DataError, match="hold no metrics.jsonl.*name that folder or one above"):
        list_runs(str(tmp_path))
    with pytest.raises(DataError, match="is not a folder: name one"):
        list_runs(str(tmp_path / "nothing"))
