"""The project's kernels, launched by MindSpore on a device whose memory is this process's, with values.

Host sides and kernels are the project's own; the kernels run in the simulator (tests/support/ascendc_model). It refuses
NaN on the cube cores, where an NPU may end in an error of execution: that happens in two cases of lora_delta in
16 bits. Each mode runs some of the dtypes, and all of them with MINDLORA_ASCEND_RUNS=all.
"""

import pathlib
import shutil

import pytest

from mindlora.ops import ascend
from tests.support.ascend_backend import EVERYTHING, on_request, run_program
from tests.support.ascend_backend.printed import printed
from tests.support.cann_stand_in import write_headers_for_mindspore

PROGRAMS = pathlib.Path(__file__).resolve().parents[1] / "support/ascend_backend/programs"
MODES = ("graph", "pynative")
ALL_DTYPES = ("float32", "float16", "bfloat16")
KERNELS = {"LoraDelta", "LoraLinear", "MultiLoraDelta", "MultiLoraSlotWrite", "Nf4Dequantize"}
# Too old for the module by which PyNative calls the kernels; without it, ops.Custom calls them there too.
OLD = ascend.age_problem() is not None


def compare(folder, mode, dtypes, *module, **environment):
    """Runs operators.py, asserts that all cases hold, and returns how the kernels were called."""
    dtypes = ALL_DTYPES if EVERYTHING else dtypes
    program = str(PROGRAMS / "operators.py")
    arguments = (mode, ",".join(dtypes), *module)
    run = run_program(program, *arguments, folder=folder, launches=True, environment=environment)
    compared = printed(run.output, "compared")
    assert run.returncode == 0 and len(compared) == 5 * len(dtypes), run.output[-3000:]
    assert {launch.name for launch in run.launches} >= KERNELS
    assert all(launch.computed for launch in run.launches)
    assert all(count > 3 for _, _, count, _ in compared)
    refused = []
    for operator, dtype, _, failures in compared:
        for failure in failures:
            assert "Mmad: fm has NaN" in failure["problem"], (operator, dtype, failure)
            refused.append((operator, dtype, failure["case"].split(",")[0]))
    assert refused == [
        ("lora_delta", dtype, f"{mode}: nan in one number of {name}")
        for dtype in dtypes
        if dtype != "float32"
        for name in ("y0", "x")
    ]
    return printed(run.output, "called")[0]


@pytest.mark.parametrize("mode", MODES if OLD or EVERYTHING else MODES[:1])
def test_every_operator_and_its_gradients_are_as_their_references(tmp_path, mode):
    assert compare(tmp_path, mode, ("float32", "bfloat16")).startswith("called by ops.Custom, in PyNative too: ")


@on_request
@pytest.mark.skipif(OLD, reason="the module is for MindSpore from 2.9 on")
@pytest.mark.skipif(shutil.which("ninja") is None, reason="MindSpore builds modules with ninja")
def test_the_module_of_pynative_is_built_and_loaded_and_calls_every_operator(tmp_path):
    write_headers_for_mindspore(tmp_path / "include")
    module = tmp_path / "module/mindlora_pynative.so"
    called = compare(tmp_path, "pynative", ALL_DTYPES, str(module), CPATH=str(tmp_path / "include"))
    assert called == f"called by ops.Custom in graph mode, and in PyNative by AclnnOpRunner, {module}"


@pytest.fixture(scope="module", params=MODES if EVERYTHING else MODES[:1])
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
