"""The library in a process of its own: its version, its instruction set, its threads."""

import pytest

from mindlora.ops import backend
from tests.support.operator_process import EMULATOR, OperatorProcess


@pytest.mark.parametrize("threads", [1, 2])
def test_version_instruction_set_and_threads(library, threads):
    process = OperatorProcess(OMP_NUM_THREADS=str(threads))
    assert process.mindlora_library_version() == backend._LIBRARY_VERSION
    assert process.mindlora_set_isa(-1) == (0 if EMULATOR else library.mindlora_set_isa(-1))
    assert process.omp_get_max_threads() == threads
    process.close()
