"""Ranks that crash where MindSpore connects them start once more; ranks that crash elsewhere have failed."""

import pytest

from tests.support.ranks import run_ranks

# The second process of a run crashes, once where ONCE says so, in a thread of C or in Python.
SCRIPT = """
import ctypes, os, pathlib, time
ran = pathlib.Path("..", os.environ["RANK_ID"])
if ran.name == "1" and not (ONCE and ran.exists()):
    ran.touch()
    pathlib.Path("written").touch()
    CRASH
    time.sleep(60)
print("ended beside", *sorted(os.listdir()))
"""
IN_C = "ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.c_void_p(8), None)"
IN_PYTHON = "ctypes.string_at(8)"


def run(folder, once, crash):
    folder = folder / "run"
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("ONCE", str(once)).replace("CRASH", crash))
    return run_ranks(2, folder, script)


def test_ranks_start_once_more_in_the_folder_as_it_was_where_one_crashed_outside_of_python(tmp_path):
    assert run(tmp_path, True, IN_C) == ["ended beside log script.py\n"] * 2


@pytest.mark.parametrize("once, crash", [(False, IN_C), (True, IN_PYTHON)])
def test_other_crashes_are_failures(tmp_path, once, crash):
    with pytest.raises(AssertionError, match="exit code 245, not 0"):
        run(tmp_path, once, crash)
