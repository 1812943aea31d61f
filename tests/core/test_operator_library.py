"""The library of the operators is loaded before MindSpore's, and one that cannot be is left for others to speak of."""

import subprocess
import sys

import pytest

from mindlora.core import operator_library

# The libraries of a process in the order in which its loader looks at them.
IN_ORDER = """
import ctypes, sys
from mindlora.cli.engine import prepare_imports
prepare_imports()
assert "mindspore" not in sys.modules
import mindspore

class Library(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Library), ctypes.c_size_t, ctypes.c_void_p)
def show(library, size, data):
    print(library.contents.name.decode())
    return 0

ctypes.CDLL(None).dl_iterate_phdr(show, None)
"""


def test_it_comes_before_the_libraries_of_mindspore(library):
    run = subprocess.run([sys.executable, "-c", IN_ORDER], capture_output=True, text=True, check=True)
    names = run.stdout.splitlines()
    first = next(place for place, name in enumerate(names) if "libmindspore" in name)
    assert operator_library.LIBRARY in names[:first]


@pytest.mark.parametrize("content", [None, b"no library"])
def test_one_that_cannot_be_loaded_is_left_alone(tmp_path, monkeypatch, content):
    path = tmp_path / "lib.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(operator_library, "LIBRARY", str(path))
    operator_library.load_before_mindspore()
    assert (operator_library.file_problem(str(path)) is None) == (content is not None)
