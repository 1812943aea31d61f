"""Writing MindRecord: replaced only on request, and never half written."""

import os
import signal

import numpy as np
import pytest

from mindlora.core.errors import DataError
from mindlora.data.mindrecord import write_mindrecord
from tests.support import tiny_runs
from tests.support.instruction_rows import names, read_back


def rows_of(value, count):
    return [{"input_ids": np.full(3, value, np.int32), "labels": np.full(3, value, np.int32)} for _ in range(count)]


def test_an_output_is_replaced_only_if_asked(tmp_path):
    path = str(tmp_path / "x.mindrecord")
    assert write_mindrecord(rows_of(1, 2500), path) == 2500
    with pytest.raises(DataError, match="exists already"):
        write_mindrecord(rows_of(2, 1), path)
    assert len(read_back(path)) == 2500
    write_mindrecord(rows_of(2, 4), path, overwrite=True)
    assert [row["labels"].tolist() for row in read_back(path)] == [[2, 2, 2]] * 4
    assert names(tmp_path) == ["x.mindrecord", "x.mindrecord.db"]


@pytest.mark.parametrize(
    "bad",
    [
        {"input_ids": np.zeros(4, np.int32), "labels": np.zeros(3, np.int32)},
        {"input_ids": np.zeros(3, np.int32)},
        {"input_ids": np.zeros(3, np.int64), "labels": np.zeros(3, np.int64)},
    ],
)
def test_a_failed_write_leaves_what_was_there(tmp_path, bad):
    path = str(tmp_path / "x.mindrecord")
    write_mindrecord(rows_of(1, 2), path)
    with pytest.raises(DataError, match="Row 1202 "):
        write_mindrecord(rows_of(2, 1201) + [bad], path, overwrite=True)
    with pytest.raises(DataError, match="Row 1 .*int32|Row 2 "):
        write_mindrecord([bad] + rows_of(2, 1), path, overwrite=True)
    with pytest.raises(DataError, match="no row"):
        write_mindrecord([], path, overwrite=True)
    assert [row["labels"].tolist() for row in read_back(path)] == [[1, 1, 1]] * 2
    assert names(tmp_path) == ["x.mindrecord", "x.mindrecord.db"]


def test_a_failed_move_leaves_no_file_with_the_index_of_another(tmp_path, monkeypatch):
    path = str(tmp_path / "x.mindrecord")
    write_mindrecord(rows_of(1, 2), path)
    replace = os.replace

    def fail_at_the_end(source, target):
        if target == path:
            raise OSError("killed")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_the_end)
    with pytest.raises(OSError, match="killed"):
        write_mindrecord(rows_of(2, 4), path, overwrite=True)
    assert not os.path.exists(path)


def test_a_kill_leaves_nothing_under_the_name(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        "import numpy as np\n"
        "from mindlora.data.mindrecord import write_mindrecord\n"
        "def rows():\n"
        "    for number in range(5000):\n"
        "        yield {'labels': np.zeros(3, np.int32)}\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_mindrecord(rows(), sys.argv[1])\n"
    )
    finished = tiny_runs.python([str(script), str(tmp_path / "x.mindrecord")], tmp_path)
    assert finished.returncode == -signal.SIGKILL
    assert not [name for name in names(tmp_path) if name.startswith("x.")]


@pytest.mark.parametrize(
    "name, message",
    [
        ("x.bin", "must end in .mindrecord"),
        ("a?b.mindrecord", "cannot be written.*should not contain"),
        ("folder.mindrecord", "is a folder"),
    ],
)
def test_outputs_that_cannot_be_written(tmp_path, name, message):
    (tmp_path / "folder.mindrecord").mkdir()
    with pytest.raises(DataError, match=message):
        write_mindrecord(rows_of(1, 1), str(tmp_path / name))
    assert names(tmp_path) == ["folder.mindrecord"]


def test_what_fails_while_the_rows_are_made_is_not_the_writer_s(tmp_path):
    def rows():
        yield {"input_ids": np.ones(3, np.int32)}
        raise RuntimeError("The network has another length.")

    with pytest.raises(RuntimeError, match="^The network has another length.$"):
        write_mindrecord(rows(), str(tmp_path / "x.mindrecord"))
    assert os.listdir(tmp_path) == []
