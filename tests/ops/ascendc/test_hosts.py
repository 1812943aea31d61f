"""The operators' host sides: what they refuse, how they launch, and what they take over of measured figures.

They are asked by a stand-in for CANN (tests/support/cann_stand_in.py), without memory and without kernels.
"""

import ctypes
import json

import pytest

from mindlora import __version__
from mindlora.ops import measured
from tests.conftest import ROOT


@pytest.fixture
def answer(stand_in):
    """Returns an operator's answer, code and bytes of workspace, to tensors (shape, dtype's number) without memory."""
    acl = ctypes.CDLL(str(stand_in["cann"] / "lib64/libascendcl.so"), ctypes.RTLD_GLOBAL)
    opapi = ctypes.CDLL(str(stand_in["package"] / "op_api/lib/libcust_opapi.so"))
    acl.aclCreateTensor.restype = ctypes.c_void_p

    def made(shape, dtype):
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        return ctypes.c_void_p(acl.aclCreateTensor(sizes, len(shape), dtype, None, 0, 2, None, 0, None))

    def ask(op_type, *tensors):
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        function = opapi[f"aclnn{op_type}GetWorkspaceSize"]
        code = function(*[made(*tensor) for tensor in tensors], ctypes.byref(size), ctypes.byref(executor))
        return code, size.value

    return ask


def test_a_row_of_more_bytes_than_a_stride_can_say_is_refused(answer):
    def code(k, n):
        return answer("LoraDelta", *((shape, 0) for shape in ((1, n), (1, k), (1, k), (n, 1), (1,), (1, n))))[0]

    most = 2**30 - 1  # of 4 bytes each
    assert [code(k, n) for k, n in ((most, 16), (16, most), (most + 1, 16), (16, most + 1))] == [0, 0, 561002, 561002]


def test_the_workspace_has_room_for_canns_own(answer):
    """What GetLibApiWorkSpaceSize says comes on top of the kernel's, which is nothing where no core waits."""
    float32, uint8 = 0, 4
    codes, absmax, scales = ((1, 32), uint8), ((1, 1), uint8), ((1,), float32)
    assert answer("Nf4Dequantize", ((1,), float32), codes, absmax, scales, scales, ((1, 64), float32)) == (0, 4096)


def test_what_is_written_in_place_is_not_copied_before(answer):
    """AutoContiguous would have CANN write into a copy of a pool that is not contiguous, or copy the whole back."""
    float32, int32 = 0, 3
    numbers = (((2,), int32), ((2,), float32), ((1,), int32), ((1, 8), float32), ((1,), float32), ((1,), int32))
    assert answer("MultiLoraSlotWrite", ((2, 1, 8), float32), *numbers)[0] == 0


def test_cores_can_be_forced_for_measurements(answer, monkeypatch, capfd):
    def workspace(tokens, **forced):
        for name in ("CORES", "KIND"):
            monkeypatch.delenv(f"MINDLORA_ASCEND_{name}", raising=False)
        for name, value in forced.items():
            monkeypatch.setenv(f"MINDLORA_ASCEND_{name}", value)
        wide, low = ((tokens, 4096), 1), ((16, 4096), 1)
        return answer("LoraDelta", wide, wide, low, ((4096, 16), 1), ((1,), 0), wide)

    # Few tokens are the vector cores', many the cube cores'.
    assert workspace(4) == workspace(4, KIND="vector") != workspace(4, KIND="cube")
    assert workspace(64) == workspace(64, KIND="cube") != workspace(64, KIND="vector")
    # One token is written by each of the cores that shrink, so as often as there are cores.
    assert workspace(1)[1] > workspace(1, CORES="4")[1] > workspace(1, CORES="1")[1]
    assert workspace(1) == workspace(1, CORES="24")
    for forced, said in (
        ({"CORES": "25"}, "MINDLORA_ASCEND_CORES is 25: it must be 1 to 24."),
        ({"CORES": "four"}, "MINDLORA_ASCEND_CORES is 0: it must be 1 to 24."),
        ({"KIND": "both"}, "MINDLORA_ASCEND_KIND is both: it must be cube or vector."),
    ):
        assert workspace(1, **forced)[0] == 561002
        assert capfd.readouterr().err == f"mindlora lora_delta (ascend): {said}\n"


def test_more_slots_than_the_table_of_a_core_has_room_for_are_refused(answer):
    float32, int32 = 0, 3

    def code(slots):
        rows, numbers = ((1, 4), float32), (((slots,), int32), ((slots,), float32), ((1,), int32))
        return answer("MultiLoraDelta", rows, rows, ((slots, 1, 8), float32), *numbers, rows)[0]

    # With 8,638 it runs: test_as_many_slots_as_the_table_has_room_for.
    assert [code(slots) for slots in (8638, 8639, 8648)] == [0, 561002, 561002]


def test_multi_lora_delta_takes_more_indices_than_tokens_and_not_fewer(answer):
    """A server keeps one Parameter of indices, as long as a step may be."""
    float32, int32 = 0, 3

    def code(indices):
        rows, pool = ((3, 4), float32), ((2, 1, 8), float32)
        return answer("MultiLoraDelta", rows, rows, pool, ((2,), int32), ((2,), float32), ((indices,), int32), rows)[0]

    assert [code(indices) for indices in (2, 3, 4, 512)] == [561002, 0, 0, 0]


@pytest.fixture
def adopted(tmp_path, monkeypatch):
    """Returns a function that adopts a page with made-up times, and tells the host sides."""
    monkeypatch.syspath_prepend(f"{ROOT}/scripts")
    monkeypatch.setattr(measured, "FILE", str(tmp_path / "measured.json"))
    for variable in measured.VARIABLES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)

    def adopt(part, microseconds):
        from verify_npu_choices import choices
        from verify_npu_run import HELD, Outcome

        timed = Outcome(f"ways {part}", HELD, "", figures={"part": part, "microseconds": microseconds})
        page = {"machine": {"name": "rack 7", "mindlora": __version__}, "choices": choices([timed], "Ascend")}
        (tmp_path / "report.json").write_text(json.dumps(page))
        measured.adopt(str(tmp_path))
        measured.tell_plans()

    return adopt


def lora_delta(answer, tokens, rank):
    """The answer to lora_delta at 4096 x 4096 in float16."""
    float32, float16 = 0, 1
    wide, a, b = ((tokens, 4096), float16), ((rank, 4096), float16), ((4096, rank), float16)
    return answer("LoraDelta", wide, wide, a, b, ((1,), float32), wide)


def times(part, microseconds):
    """The same time for each shape of a part."""
    from verify_npu_ways import SHAPES, title

    return {title(*shape): {"median": microseconds, "blocks": "24"} for shape in SHAPES[part]}


def test_where_launches_of_cube_cores_measured_slow_the_vector_cores_compute(library, answer, adopted, monkeypatch):
    before = lora_delta(answer, 8, 64)
    adopted("kinds", {"vector": times("kinds", 10), "cube": times("kinds", 13)})
    after = lora_delta(answer, 8, 64)
    # What the cube gains by the estimate, it did not gain.
    assert measured.measured().mix_launch > 3000
    monkeypatch.setenv("MINDLORA_ASCEND_KIND", "cube")
    assert lora_delta(answer, 8, 64) == before != after
    monkeypatch.setenv("MINDLORA_ASCEND_KIND", "vector")
    assert lora_delta(answer, 8, 64) == after


def test_where_few_cores_measured_as_fast_as_all_few_take_part(answer, adopted, monkeypatch):
    before = lora_delta(answer, 512, 64)
    saturated = {str(cores): times("cores", max(20, 160 // cores)) for cores in (2, 4, 8, 12, 16, 20, 24)}
    adopted("cores", saturated)
    assert measured.measured().draw_tenths == 30
    # Each core that shrinks writes its part of x A^T.
    assert lora_delta(answer, 512, 64)[1] < before[1]
    monkeypatch.delenv("MINDLORA_ASCEND_DRAW")
    assert lora_delta(answer, 512, 64) == before


def test_what_the_environment_says_comes_before_what_was_adopted(answer, adopted, monkeypatch, capfd):
    monkeypatch.setenv("MINDLORA_ASCEND_DRAW", "9")
    adopted("cores", {"8": times("cores", 30), "24": times("cores", 10)})
    assert measured.measured().draw_tenths == 10 and lora_delta(answer, 8, 64)[0] == 561002
    assert capfd.readouterr().err == "mindlora lora_delta (ascend): MINDLORA_ASCEND_DRAW is 9: it must be 10 to 1000.\n"


FLOAT32, FLOAT16, INT32, UINT8 = 0, 1, 3, 4
# The tensors of a call that each host takes: shape and dtype, the outputs last.
CALLS = {
    "LoraDelta": {"y0": (3, 16), "x": (3, 8), "a": (2, 8), "b": (16, 2), "scale": ((1,), FLOAT32), "y": (3, 16)},
    "LoraLinear": {
        "x": (3, 8),
        "w": (16, 8),
        "a": (2, 8),
        "b": (16, 2),
        "scale": ((1,), FLOAT32),
        "bias": (16,),
        "y": (3, 16),
    },
    "MultiLoraDelta": {
        "y0": (3, 16),
        "x": (3, 8),
        "pool": (4, 2, 24),
        "ranks": ((4,), INT32),
        "scales": ((4,), FLOAT32),
        "indices": ((3,), INT32),
        "y": (3, 16),
    },
    "MultiLoraSlotWrite": {
        "pool": (4, 2, 24),
        "ranks": ((4,), INT32),
        "scales": ((4,), FLOAT32),
        "slot": ((1,), INT32),
        "packed": (2, 24),
        "scale": ((1,), FLOAT32),
        "written": ((1,), INT32),
    },
    "Nf4Dequantize": {
        "like": (1, 100),
        "codes": ((9, 64), UINT8),
        "absmax": ((9, 2), UINT8),
        "scales": ((1,), FLOAT32),
        "offsets": ((1,), FLOAT32),
        "w": (9, 100),
    },
}
NOT_EVEN = "{} is {} in one input and {} in another"
REFUSED = [
    ("LoraDelta", {"x": (4, 8)}, NOT_EVEN.format("the number of tokens", 3, 4)),
    ("LoraDelta", {"a": (2, 9)}, NOT_EVEN.format("K", 8, 9)),
    ("LoraDelta", {"b": (15, 2)}, NOT_EVEN.format("N", 16, 15)),
    ("LoraDelta", {"b": (16, 3)}, NOT_EVEN.format("the rank", 2, 3)),
    ("LoraDelta", {"a": (257, 8), "b": (16, 257)}, "rank is 257: it must be 1 to 256"),
    ("LoraDelta", {"a": (0, 8), "b": (16, 0)}, "rank is 0: it must be 1 to 256"),
    ("LoraDelta", {"scale": ((2,), FLOAT32)}, "scale must be one number"),
    ("LoraDelta", {"x": (3, 2, 8)}, "x has 3 dimensions: it must have 2"),
    ("LoraLinear", {"w": (16, 9)}, NOT_EVEN.format("K", 8, 9)),
    ("LoraLinear", {"a": (2, 9)}, NOT_EVEN.format("K", 8, 9)),
    ("LoraLinear", {"b": (17, 2)}, NOT_EVEN.format("N", 16, 17)),
    ("LoraLinear", {"bias": (15,)}, NOT_EVEN.format("N", 16, 15)),
    ("LoraLinear", {"bias": (1, 1, 1)}, "bias has 3 dimensions: it must have 2"),
    ("LoraLinear", {"scale": ((2,), FLOAT32)}, "scale must be one number"),
    ("MultiLoraDelta", {"x": (4, 8)}, NOT_EVEN.format("the number of tokens", 3, 4)),
    ("MultiLoraDelta", {"indices": ((2,), INT32)}, "the number of indices is 2: it must be 3 to 2147483647"),
    ("MultiLoraDelta", {"pool": (4, 2, 25)}, NOT_EVEN.format("K + N", 24, 25)),
    ("MultiLoraDelta", {"ranks": ((5,), INT32)}, NOT_EVEN.format("the number of slots", 4, 5)),
    ("MultiLoraDelta", {"scales": ((3,), FLOAT32)}, NOT_EVEN.format("the number of slots", 4, 3)),
    ("MultiLoraDelta", {"pool": (4, 257, 24)}, "max_rank is 257: it must be 1 to 256"),
    ("MultiLoraSlotWrite", {"packed": (2, 23)}, NOT_EVEN.format("K + N", 24, 23)),
    ("MultiLoraSlotWrite", {"packed": (3, 24)}, "rank is 3: it must be 1 to 2"),
    ("MultiLoraSlotWrite", {"scale": ((2,), FLOAT32)}, "scale must be one number"),
    ("MultiLoraSlotWrite", {"ranks": ((5,), INT32)}, NOT_EVEN.format("the number of slots", 4, 5)),
    ("Nf4Dequantize", {"codes": ((8, 64), UINT8)}, NOT_EVEN.format("N", 9, 8)),
    ("Nf4Dequantize", {"codes": ((9, 65), UINT8)}, NOT_EVEN.format("the number of bytes of a row", 65, 64)),
    ("Nf4Dequantize", {"like": (1, 129), "w": (9, 129)}, NOT_EVEN.format("the number of blocks of a row", 3, 2)),
    ("Nf4Dequantize", {"scales": ((2,), FLOAT32)}, NOT_EVEN.format("the number of groups", 1, 2)),
    ("Nf4Dequantize", {"offsets": ((2,), FLOAT32)}, NOT_EVEN.format("the number of groups", 1, 2)),
]


def tensors_of(call):
    """(shape, dtype) of each tensor; those that name no dtype are float16."""
    return [tensor if isinstance(tensor[0], tuple) else (tensor, FLOAT16) for tensor in call.values()]


@pytest.mark.parametrize("op_type", CALLS)
def test_a_right_call_is_planned(answer, op_type, capfd):
    assert answer(op_type, *tensors_of(CALLS[op_type]))[0] == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("op_type, wrong, said", REFUSED)
def test_shapes_that_do_not_match_are_refused_with_one_line(answer, op_type, wrong, said, capfd):
    assert answer(op_type, *tensors_of({**CALLS[op_type], **wrong}))[0] == 561002
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].endswith(f" (ascend): {said}."), lines


@pytest.mark.parametrize(
    "op_type, name, dtype",
    [
        ("LoraDelta", "scale", FLOAT16),
        ("LoraDelta", "a", FLOAT32),
        ("LoraLinear", "scale", FLOAT16),
        ("LoraLinear", "bias", FLOAT32),
        ("MultiLoraDelta", "indices", FLOAT32),
        ("MultiLoraDelta", "scales", FLOAT16),
        ("MultiLoraSlotWrite", "packed", FLOAT32),
        ("MultiLoraSlotWrite", "ranks", FLOAT32),
        ("Nf4Dequantize", "absmax", INT32),
    ],
)
def test_another_dtype_has_no_kernel(answer, op_type, name, dtype):
    call = dict(CALLS[op_type])
    shape = call[name][0] if isinstance(call[name][0], tuple) else call[name]
    assert answer(op_type, *tensors_of({**call, name: (shape, dtype)}))[0] == 161002
