"""The library is opened late in a process: after MindSpore, when other libraries may have used up the static TLS.

That is memory which the loader keeps for each thread, some 1.7 KB for all libraries that are opened after the start.
libgomp, which the library needs, takes some of it; the library itself must not.
"""

import shutil

import pytest

from tests.support.operator_process import OperatorProcess, compiled


@pytest.fixture
def greedy(library, tmp_path):
    """Paths of libraries that leave no static TLS to those after them."""
    one = compiled("static_tls.cc", "-shared", "-fPIC")
    return [shutil.copy(one, tmp_path / f"{number}.so") for number in range(64)]


def assert_works(process):
    assert process.omp_get_max_threads() >= 1 and process.mindlora_set_isa(0) == 0
    process.close()


def test_after_mindspore_which_needs_libgomp_too_the_library_opens(greedy):
    assert_works(OperatorProcess("libgomp.so.1", *greedy))


def test_where_libgomp_was_not_opened_in_time_the_loader_says_so(greedy):
    with pytest.raises(OSError, match="libgomp.so.1: cannot allocate memory in static TLS block"):
        OperatorProcess(*greedy)


def test_libgomp_named_in_ld_preload_is_in_time(greedy):
    assert_works(OperatorProcess(*greedy, LD_PRELOAD="libgomp.so.1"))
