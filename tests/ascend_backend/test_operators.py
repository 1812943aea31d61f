"""The project's kernels, launched by MindSpore on a device whose memory is this process's, with values.

Host sides and kernels are the project's own; the kernels run in the simulator of ops/ascendc_model.
"""

import pathlib
import shutil

import pytest

from mindlora.ops import ascend_pynative
from tests.support.ascend_backend import run_program
from tests.support.ascend_backend.printed import printed
from tests.support.cann_stand_in import write_headers_for_mindspore

PROGRAMS = pathlib.Path(__file__).resolve().parents[1] / "support/ascend_backend/programs"
MODES = ("graph", "pynative")
# Too old for the module by which PyNative calls the kernels; without it, ops.Custom calls them there too.
OLD = ascend_pynative.age_problem() is not None


def compare(folder, *arguments, **environment):
    """Runs operators.py, asserts that all cases hold, and returns how the kernels were called."""
    program = str(PROGRAMS / "operators.py")
    run = run_program(program, *arguments, folder=folder, launches=True, environment=environment)
    compared = printed(run.output, "compared")
    assert run.returncode == 0 and len(compared) == 15, run.output[-3000:]
    failed = [(op, dtype, *case.values()) for op, dtype, _, cases in compared for case in cases]
    assert not [case for case in failed if not may_be_refused(*case)], failed
    assert all(count > 3 for _, _, count, _ in compared)
    return printed(run.output, "called")[0]


def may_be_refused(operator, dtype, title, problem):
    """Whether NaN or infinity may meet the cube cores: the simulator refuses what may end in an error of execution."""
    return dtype != "float32" and " in one number of " in title


@pytest.mark.parametrize("mode", MODES if OLD else MODES[:1])
def test_every_operator_and_its_gradients_are_as_their_references_in_every_dtype(tmp_path, mode):
    assert compare(tmp_path, mode).startswith("called by ops.Custom, in PyNative too: ")


@pytest.mark.skipif(OLD, reason="the module is for MindSpore from 2.9 on")
@pytest.mark.skipif(shutil.which("ninja") is None, reason="MindSpore builds modules with ninja")
def test_the_module_of_pynative_is_built_and_loaded_and_calls_every_operator(tmp_path):
    write_headers_for_mindspore(tmp_path / "include")
    module = tmp_path / "module/mindlora_pynative.so"
    called = compare(tmp_path, "pynative", str(module), CPATH=str(tmp_path / "include"))
    assert called == f"called by ops.Custom in graph mode, and in PyNative by AclnnOpRunner, {module}"


@pytest.fixture(scope="module", params=MODES)
def calls(request, tmp_path_factory):
    """Runs operator_calls.py in a mode."""
    folder = tmp_path_factory.mktemp(request.param)
    run = run_program(str(PROGRAMS / "operator_calls.py"), request.param, folder=folder, launches=True)
    assert run.returncode == 0, run.output[-3000:]
    return run


def test_what_no_kernel_takes_is_refused_before_it_is_launched(calls):
    refused = dict(printed(calls.output, "refused"))
    assert len(refused) == 8 and all(refused.values()), refused
    assert "fewer indices" not in refused and "257" in refused["rank 257"]


def test_memory_that_moves_slots_beyond_the_pool_and_writes_in_place(calls):
    held = printed(calls.output, "held")
    assert len(held) == 12 and all(right for _, right in held), held
