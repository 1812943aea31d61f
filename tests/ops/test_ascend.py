"""When the Ascend kernels are picked, with fake operator packages, and how MindSpore is told to call them.

Nothing is computed: this needs no NPU and proves nothing about one.
"""

import copy
import ctypes
import json
import os
import re

import mindspore as ms
import pytest
from mindspore.ops.operations import custom_ops

from mindlora.core.errors import BackendError
from mindlora.network.cells.low_rank import ComposedLowRank, FusedLowRank, pick_low_rank
from mindlora.ops import LoraDelta, MultiLoraSlotWrite, Nf4LinearWithBias, ascend, backend, backend_report
from mindlora.ops.build import LIBRARY
from tests.conftest import ROOT

ROUTE = ascend.describe(LIBRARY)
KERNELS = ("lora_delta", "lora_linear", "multi_lora_delta", "multi_lora_slot_write", "nf4_linear")
# The folder of each kernel's sources.
FOLDERS = {
    "LoraDelta": "lora_delta",
    "LoraLinear": "lora_linear",
    "MultiLoraDelta": "multi_lora_delta",
    "MultiLoraSlotWrite": "multi_lora_slot_write",
    "Nf4Dequantize": "nf4_dequantize",
}


class Context:
    """A substitute for MindSpore's context, which knows the NPU."""

    soc = "ascend910b"

    @classmethod
    def get_instance(cls):
        return cls

    @classmethod
    def get_ascend_soc_version(cls):
        return cls.soc


@pytest.fixture(autouse=True)
def npu(library, monkeypatch, tmp_path):
    """A machine that claims to have an Atlas A2, and a CANN without any operator package."""
    real = ms.get_context
    monkeypatch.setattr(ms, "get_context", lambda key: "Ascend" if key == "device_target" else real(key))
    monkeypatch.setattr(ascend, "MSContext", Context)
    monkeypatch.setattr(Context, "soc", "ascend910b")
    monkeypatch.setattr(ascend, "PACKAGE", str(tmp_path / "built"))
    for variable in ("MINDLORA_BACKEND", "MS_CUSTOM_AOT_WHITE_LIST", "ASCEND_CUSTOM_OPP_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path / "opp"))
    (tmp_path / "opp").mkdir()
    return tmp_path


def make_package(folder, soc="ascend910b", op_types=tuple(ascend.SIGNATURES)):
    """What CANN's installer leaves of a package, as far as mindlora looks at it."""
    config = folder / "op_impl/ai_core/tbe/config" / soc
    config.mkdir(parents=True)
    (config / f"aic-{soc}-ops-info.json").write_text(json.dumps({op_type: {} for op_type in op_types}))
    (folder / "op_api/lib").mkdir(parents=True)
    (folder / "op_api/lib/libcust_opapi.so").touch()
    return str(folder)


def paths():
    return {choice.op: choice.path for choice in backend_report().choices if choice.op in KERNELS}


def assert_out(monkeypatch, reason, ops=KERNELS):
    """Asserts that the reason is in the report and, if the path is forced, in the error."""
    found = {choice.op: choice for choice in backend_report().choices}
    for op in ops:
        assert found[op].path == "composed" and reason in found[op].reason, str(found[op])
        monkeypatch.setenv("MINDLORA_BACKEND", "ascend")
        with pytest.raises(BackendError) as error:
            backend.choose(op)
        assert str(error.value).startswith("MINDLORA_BACKEND is ascend, but ") and reason in str(error.value)
        monkeypatch.delenv("MINDLORA_BACKEND")


def test_a_registered_package_is_taken(monkeypatch, npu, mode):
    package = make_package(npu / "vendors/mindlora")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{npu}/another:{package}:")
    assert set(paths().values()) == {"ascend"}
    monkeypatch.setenv("MINDLORA_BACKEND", "ascend")
    assert set(paths().values()) == {"ascend"}
    monkeypatch.setenv("MINDLORA_BACKEND", "composed")
    assert set(paths().values()) == {"composed"}


def test_a_package_among_the_vendors_of_cann_is_taken(monkeypatch, npu):
    make_package(npu / "opp/vendors/mindlora")
    assert_out(monkeypatch, "is not in any operator package")
    (npu / "opp/vendors/config.ini").write_text("load_priority=customize,mindlora\n")
    assert set(paths().values()) == {"ascend"}


def test_operators_without_an_ascend_kernel_are_composed_and_the_report_says_so(monkeypatch, npu):
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", make_package(npu / "package"))
    for forced in ("", "ascend"):
        monkeypatch.setenv("MINDLORA_BACKEND", forced)
        choices = {choice.op: (choice.path, choice.reason) for choice in backend_report().choices}
        assert set(choices) == {*KERNELS, "lora_dropout", "multi_lora_linear", *backend.CPU_ONLY}
        reason = "it has no Ascend kernel, even if MINDLORA_BACKEND asks for one"
        assert choices["lora_dropout"] == choices["multi_lora_linear"] == ("composed", reason)
        if not forced:
            assert choices["nf4_linear"] == (
                "ascend",
                f"Nf4Dequantize in Ascend C, from the operator package that CANN finds; {ROUTE}",
            )
        else:
            assert choices["nf4_linear"] == ("ascend", f"MINDLORA_BACKEND asks for it; {ROUTE}")


def test_a_package_that_is_built_but_not_registered(monkeypatch, npu):
    make_package(npu / "built")
    assert_out(monkeypatch, f"the kernels are not registered: `source {npu}/built/bin/set_env.bash` before Python")


def test_a_package_that_lacks_an_operator(monkeypatch, npu):
    package = make_package(npu / "package", op_types=("LoraDelta",))
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", package)
    assert paths()["lora_delta"] == "ascend"
    assert_out(
        monkeypatch,
        f"LoraLinear for ascend910b is not in {package}: build the kernels with "
        "scripts/build_ascend.sh --soc ascend910b",
        ("lora_linear",),
    )


def test_a_package_for_another_npu(monkeypatch, npu):
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", make_package(npu / "package", soc="ascend910_93"))
    assert_out(monkeypatch, "for ascend910b is not in")
    monkeypatch.setattr(Context, "soc", "ascend910_93")
    assert set(paths().values()) == {"ascend"}


def test_a_package_without_its_library(monkeypatch, npu):
    package = make_package(npu / "package")
    os.remove(f"{package}/op_api/lib/libcust_opapi.so")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", package)
    assert_out(monkeypatch, f"{package}/op_api/lib/libcust_opapi.so is missing")


def test_a_damaged_list_of_operators(monkeypatch, npu):
    package = make_package(npu / "package")
    (npu / "package/op_impl/ai_core/tbe/config/ascend910b/aic-ascend910b-ops-info.json").write_text("{")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", package)
    assert_out(monkeypatch, "is not in")


@pytest.mark.parametrize("soc, name", [("ascend310p", "ascend310p"), ("ascend910", "ascend910"), ("", "unknown")])
def test_an_npu_that_has_no_kernels(monkeypatch, npu, soc, name):
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", make_package(npu / "package", soc=soc or "x"))
    monkeypatch.setattr(Context, "soc", soc)
    assert_out(monkeypatch, f"the NPU is {name}, but the kernels are built for ascend910b and ascend910_93")


def test_what_mindspore_needs_besides(monkeypatch, npu):
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", make_package(npu / "package"))
    with monkeypatch.context() as patch:
        patch.delenv("ASCEND_OPP_PATH")
        assert_out(patch, "ASCEND_OPP_PATH is not set: source CANN's set_env.sh")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(npu))
        assert_out(patch, "g++ is not on PATH")
    with monkeypatch.context() as patch:
        patch.setattr(backend, "LIBRARY", str(npu / "none.so"))
        assert_out(patch, f"{npu}/none.so is missing: build it with `python -m mindlora.ops.build`")


@pytest.fixture
def made(monkeypatch, npu):
    """Allows creating cells with kernels: ops.Custom asks for the device and compiles against CANN's headers."""
    real = custom_ops.context.get_context
    monkeypatch.setattr(
        custom_ops.context, "get_context", lambda key: "Ascend" if key == "device_target" else real(key)
    )
    (npu / "include/acl").mkdir(parents=True)
    (npu / "include/acl/acl_base.h").write_text("#include <cstdint>\n")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", make_package(npu / "package"))
    monkeypatch.setenv("MS_COMPILER_CACHE_PATH", str(npu / "calls"))
    monkeypatch.setattr(custom_ops.Custom, "compiled_bin", [])
    return npu / "calls"


@pytest.mark.parametrize("op_type", sorted(ascend.SIGNATURES))
def test_the_call_that_mindspore_makes_of_a_kernel(made, op_type):
    kernel = ascend.AscendKernel(op_type, LIBRARY, writes=op_type == "MultiLoraSlotWrite")
    attributes = kernel.get_attr_dict()
    # aclnn<op_type> is called, with the inputs and the output; shapes and types come from the CPU library.
    assert attributes["reg_op_name"] == op_type and attributes["func_name"] == f"{LIBRARY}:{op_type}"
    assert attributes["cpp_infer_shape"] and attributes["cpp_infer_type"] and not attributes["multi_output"]
    assert attributes["custom_inputs_type"] == ["aclTensor*"] * (len(ascend.SIGNATURES[op_type]) + 1)
    assert ("side_effect_mem" in attributes) == (op_type == "MultiLoraSlotWrite")
    assert hasattr(ctypes.CDLL(str(made / f"{op_type}_callback.cc.so")), f"{op_type}GetWorkSpaceSize")
    twin = copy.deepcopy(kernel)
    assert twin is not kernel and twin.get_attr_dict()["func_name"] == attributes["func_name"]


# As CANN generates it: what is written in place is there once, without const, and one of several outputs is <name>Out.
SLOT_WRITE = """
aclnnStatus aclnnMultiLoraSlotWriteGetWorkspaceSize(
    aclTensor *poolRef,
    aclTensor *ranksRef,
    aclTensor *scalesRef,
    const aclTensor *slot,
    const aclTensor *packed,
    const aclTensor *scale,
    const aclTensor *writtenOut,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);
"""


@pytest.mark.parametrize("text, fits", [(SLOT_WRITE, True), (SLOT_WRITE.replace("aclTensor *poolRef,", ""), False)])
def test_mindspore_holds_the_registration_against_the_header_of_cann(made, npu, text, fits):
    header = npu / "package/op_api/include/aclnn_multi_lora_slot_write.h"
    header.parent.mkdir()
    header.write_text(text)
    if fits:
        ascend.AscendKernel("MultiLoraSlotWrite", LIBRARY, writes=True)
    else:
        with pytest.raises(RuntimeError, match="is not equal to aclnn api input size"):
            ascend.AscendKernel("MultiLoraSlotWrite", LIBRARY, writes=True)


@pytest.mark.parametrize("built", [True, False])
def test_pynative_calls_the_module_where_there_is_one_and_ops_custom_elsewhere(made, monkeypatch, built):
    def function(op_type, library):
        return (lambda *inputs: (op_type, library, inputs)) if built else None

    monkeypatch.setattr(ascend, "pynative_function", function)
    monkeypatch.setattr(custom_ops, "pyboost_custom_ext", lambda primitive, inputs: [(primitive.name, *inputs)])
    result = ascend.AscendKernel("LoraDelta", LIBRARY)(1, 2)
    assert result == (("LoraDelta", LIBRARY, (1, 2)) if built else ("CustomExt", (1, 2)))


def test_the_cells_hold_the_kernels(made):
    for cell, name in (
        (LoraDelta(), "LoraDelta"),
        (MultiLoraSlotWrite(), "MultiLoraSlotWrite"),
        (Nf4LinearWithBias(), "Nf4Dequantize"),
    ):
        assert cell.path == "ascend" and isinstance(cell.kernel, ascend.AscendKernel)
        assert cell.kernel.get_attr_dict()["reg_op_name"] == name


@pytest.mark.parametrize(
    "dtype, rank, channels, said",
    [
        (ms.float32, 64, (4096, 4096), "6.4 times the time of its bytes, and plain operators at 1.3"),
        (ms.float32, 8, (4096, 4096), ""),
        (ms.float16, 128, (4096, 4096), ""),
        (ms.bfloat16, 64, (4096, 152064), "9.4 times the time of its bytes, and plain operators at 1.5"),
        (ms.bfloat16, 16, (4096, 152064), "2.1 times the time of its bytes"),
        (ms.bfloat16, 64, (4096, 65535), ""),
    ],
)
def test_a_cell_takes_plain_operators_where_the_kernel_is_estimated_far_slower(
    made, monkeypatch, dtype, rank, channels, said
):
    picks = pick_low_rank(rank, dtype, 0.0, False, None, channels)
    assert picks.choice.path == ("composed" if said else "ascend") and said in picks.choice.reason
    assert isinstance(picks.low_rank, ComposedLowRank if said else FusedLowRank)
    # Few tokens are lora_linear's, whose kernel reads W as fast as it arrives.
    assert picks.decode.most_tokens == 8 and picks.decode.lora_linear.path == "ascend"
    monkeypatch.setenv("MINDLORA_BACKEND_LORA_DELTA", "ascend")
    assert backend.choose_for_cell("lora_delta", rank, dtype, False, channels).path == "ascend"


def test_each_kernel_has_a_folder():
    assert set(FOLDERS) == set(ascend.SIGNATURES) == {backend.ASCEND_OP_TYPES[op] for op in KERNELS}


@pytest.mark.parametrize("op_type, op", FOLDERS.items())
def test_cann_and_the_kernel_name_the_same_inputs_and_output(op_type, op):
    def source(path):
        with open(os.path.join(ROOT, "ops", op, "ascendc", path, f"{op}.cpp"), encoding="utf-8") as file:
            return file.read()

    inputs = list(ascend.SIGNATURES[op_type])
    host, kernel = source("op_host"), source("op_kernel")
    assert re.findall(r'In(?:Out)?\("(\w+)", ', host) == inputs and f"OP_ADD({op_type});" in host
    # What is written in place is an output of the same name, of which CANN's call, and so MindSpore, sees only one.
    in_place = re.findall(r'InOut\("(\w+)", ', host)
    outputs = re.findall(r'\bOut\("(\w+)", ', host)
    assert outputs == in_place + [entry["name"] for entry in ascend.registration(op_type)["outputs"]]
    assert in_place == (["pool", "ranks", "scales"] if op_type == "MultiLoraSlotWrite" else [])
    entry = re.search(rf"void {op}\(([^)]*)\)", kernel)[1]
    given = [*inputs, *(f"{name}_ref" if name in inputs else name for name in outputs)]
    assert re.findall(r"GM_ADDR (\w+)", entry) == [*given, "workspace", "tiling"]
    # CANN defines a macro for each input and output.
    assert set(re.findall(r"DTYPE_(\w+)", kernel)) <= {name.upper() for name in inputs + outputs}


def test_the_kernels_take_the_dtypes_of_their_tensors():
    for op_type, inputs in ascend.SIGNATURES.items():
        info = ascend.registration(op_type)
        assert info["op_name"] == op_type and info["target"] == "Ascend"
        assert [entry["name"] for entry in info["inputs"]] == list(inputs) and len(info["outputs"]) == 1
        assert [row[0][0] for row in info["dtype_format"]] == ["float32", "float16", "bfloat16"]
        for row in info["dtype_format"]:
            assert len(row) == len(inputs) + 1
            assert row[-1][0] == ("int32" if op_type == "MultiLoraSlotWrite" else row[0][0])
