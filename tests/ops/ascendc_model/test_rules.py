"""For each rule: a kernel that breaks it is rejected, with the reason; the same kernel runs without the break."""

import struct

import numpy as np
import pytest

MIX_VECTORS = {"blocks": 2, "kernel_type": "MIX_AIV_1_0"}
MIX = {"kernel_type": "MIX_AIC_1_2"}
MANUAL = {"auto_sync": False}
CUBE = {"kernel_type": "AIC_ONLY"}

BUFFER_RULES = [
    # copies
    ("copy_length", r"DataCopy: 12 elements are 48 bytes, not a multiple of 32", {}),
    ("copy_address", r"DataCopy: dst starts at address 16 of UB, which is not a multiple of 32 bytes", {}),
    ("copy_block_count", r"DataCopy: blockCount is 4096, outside \[0, 4095\]", {}),
    ("field_overflow", r"parameter: 65536 does not fit a parameter of 16 unsigned bits", {}),
    ("copy_on_chip_overlap", r"DataCopy: src and dst overlap", {}),
    ("gm_read_past_end", r"src reads bytes \[4064, 4128\) of GM buffer x, which has 4096", {}),
    ("gm_read_before_start", r"src reads bytes \[-32, 32\) of GM buffer x", {}),
    ("gm_write_past_end", r"dst writes bytes \[4064, 4128\) of GM buffer y, which has 4096", {}),
    ("gm_write_to_input", r"dst writes to GM buffer x, which is an input", {}),
    ("gm_declared_too_long", r"SetGlobalBuffer: bytes \[2048, 4128\) of GM buffer x, which has 4096", {}),
    ("gm_misaligned", r"SetGlobalBuffer: byte 1 of GM buffer x is not aligned to 2 bytes", {}),
    ("gm_unregistered", r"SetGlobalBuffer: the address is in no GM buffer of the launch", {}),
    ("pad_element", r"DataCopyPad: blockLen 6 is in bytes and must be a multiple of the element's 4", {}),
    ("pad_block_count", r"DataCopyPad: blockCount is 4096, outside", {}),
    ("pad_block_len", r"DataCopyPad: blockLen is 2097152, outside \[0, 2097151\]", {}),
    ("pad_left", r"leftPadding in bytes is 36, outside \[0, 32\]", {}),
    ("pad_right", r"rightPadding in bytes is 36, outside \[0, 32\]", {}),
    ("pad_ub_stride", r"dst writes bytes \[1056, 1088\) of VECCALC TBuf 0, which has 256", {}),
    ("pad_gm_stride", r"src reads bytes \[4160, 4192\) of GM buffer x", {}),
    ("pad_random_filling", r"src reads byte 0 of VECCALC TBuf 0, which was never written", {}),
    # buffers
    ("ub_capacity", r"InitBuffer: VECCALC TBuf 0 needs 196384 bytes of UB, 0 are taken and there are 196352", {}),
    ("l1_capacity", r"bytes of L1, 0 are taken and there are 524032", CUBE),
    ("l0a_capacity", r"bytes of L0A, 0 are taken and there are 65536", CUBE),
    ("l0b_capacity", r"bytes of L0B, 0 are taken and there are 65536", CUBE),
    ("l0c_capacity", r"bytes of L0C, 0 are taken and there are 131072", CUBE),
    ("beyond_buffer", r"Duplicate: dst writes bytes \[0, 260\) of VECCALC TBuf 0, which has 256", {}),
    ("beyond_tensor", r"LocalTensor: offset 65 of a tensor with 64 elements", {}),
    ("buf_get", r"TBuf.Get: 17 elements of 4 bytes in a buffer of 64 bytes", {}),
    ("buf_without_memory", r"TBuf.Get: the buffer has no memory", {}),
    ("two_pipes", r"TPipe: a core has one TPipe at a time", {}),
    ("many_buffers", r"InitBuffer: a kernel has at most 64 buffers", {}),
    # queues
    ("queue_depth", r"EnQue: VECIN queue 0: 2 tensors in a queue of depth 1", {}),
    ("queue_no_buffer_left", r"AllocTensor: VECIN queue 0: all 1 buffers are in use", {}),
    ("queue_empty", r"DeQue: VECIN queue 0 is empty", {}),
    ("queue_freed_twice", r"FreeTensor: VECIN queue 0 buffer 0: the tensor was given away by FreeTensor", {}),
    ("queue_enqueued_twice", r"EnQue: VECIN queue 0 buffer 0: the tensor was given away by EnQue", {}),
    ("queue_used_after_free", r"DataCopy: dst is used after FreeTensor: VECIN queue 0 buffer 0", {}),
    ("queue_used_after_enque", r"Adds: src is used after EnQue: VECIN queue 0 buffer 0", {}),
    ("queue_leak", r"end of kernel: VECIN queue 0 buffer 0 was never freed", {}),
    ("queue_never_dequeued", r"end of kernel: VECIN queue 0 buffer 0 was enqueued and never dequeued", {}),
    ("queue_foreign_tensor", r"FreeTensor: VECIN queue 1: this queue did not allocate the tensor", {}),
    ("queue_part_of_a_tensor", r"FreeTensor: VECIN queue 0: this queue did not allocate the tensor", {}),
    ("queue_without_buffers", r"AllocTensor: the queue has no buffers: InitBuffer comes first", {}),
    ("queue_events", r"InitBuffer: all 8 event ids of MTE2_V are taken", {}),
    ("queue_events_of_a_cube_core", r"AIC 0 .*InitBuffer: all 8 event ids of M_MTE1 are taken", MIX),
    ("event_id_of_the_pipe", r"AIC 0 .*SetFlag: event id 2 of M_MTE1 belongs to a queue or to TPipe", MIX),
    ("queue_poisons_at_free", r"Adds: src reads byte 0 of VECIN queue 0 buffer 0, which was never written", {}),
]

VECTOR_RULES = [
    ("mask_too_wide", r"Adds: mask is 65, outside \[0, 64\]", {}),
    ("repeat_too_often", r"parameter: 256 does not fit a parameter of 8 unsigned bits", {}),
    ("repeat_too_often_in_sum", r"WholeReduceSum: repeatTime is 256, outside \[0, 255\]", {}),
    ("negative_count", r"Duplicate: count is -1", {}),
    ("destination_stride_zero", r"Adds: dstBlkStride is 0, which is undefined", {}),
    ("operand_address", r"Adds: src starts at address 16 of UB", {}),
    ("overlap_in_part", r"Adds: src and dst overlap in part in repeat 0", {}),
    ("overlap_of_repeats", r"Adds: src of repeat 1 is dst of repeat 0", {}),
    ("accumulate_first_source", r"Add: src0 of repeat 1 is dst of repeat 0", {}),
    ("type_of_add", r"Add: dst is of type bfloat16_t, which this instruction does not support", {}),
    ("type_of_axpy", r"Axpy: dst of type bfloat16_t and src of type bfloat16_t is not a supported pair", {}),
    ("cast_none_to_bfloat16", r"Cast: float to bfloat16_t does not support CAST_NONE", {}),
    ("cast_unsupported_pair", r"Cast: half to bfloat16_t is not a supported pair", {}),
    ("integer_overflow", r"Adds: integer overflow: 2147483647 and 1", {}),
    ("sum_address", r"BlockReduceSum: dst starts at address 260 of UB, which is not a multiple of 32 bytes", {}),
    ("sum_in_place", r"WholeReduceSum: dst overlaps src in part", {}),
    ("sum_scratch", r"ReduceSum: sharedTmpBuffer has 32 bytes and needs 64", {}),
    ("brcb_in_place", r"Brcb: src and dst overlap", {}),
    ("brcb_stride", r"Brcb: dstBlkStride is 0", {}),
    ("gather_offset", r"Gather: srcOffset 1 is 6, which is not a multiple of the element's 4 bytes", {}),
    ("gather_base", r"Gather: srcBaseAddr is 2, which is not a multiple of the element's 4 bytes", {}),
    ("gather_beyond", r"Gather: src reads bytes \[280, 284\) of VECCALC TBuf 0, which has 256", {}),
    ("gather_unwritten", r"Gather: src reads byte 28 of VECCALC TBuf 1, which was never written", {}),
    ("gather_offsets_unwritten", r"Gather: srcOffset reads byte 32 of VECCALC TBuf 2, which was never written", {}),
    ("gather_from_a_short_source", r"Gather: src has 256 bytes, and CANN's CPU debugging wants 288 for 2 repeats", {}),
    ("gather_in_place", r"Gather: src and dst overlap", {}),
    ("gather_onto_offsets", r"Gather: srcOffset and dst overlap", {}),
    ("gather_address", r"Gather: dst starts at address 272 of UB, which is not a multiple of 32 bytes", {}),
    ("type_of_gather", r"Gather: dst is of type uint8_t, which this instruction does not support", {}),
    ("cast_byte_to_float", r"Cast: uint8_t to float is not a supported pair", {}),
    ("counter_mode_missing", r"Adds: the count form with isSetMask = false needs SetMaskCount", {}),
    ("counter_mode_left_on", r"end of kernel: SetMaskCount has no SetMaskNorm", {}),
    ("unwritten_vector", r"Add: src1 reads byte 0 of VECCALC TBuf 1, which was never written", {}),
    ("unwritten_by_mask", r"Adds: src reads byte 252 of VECCALC TBuf 0, which was never written", {}),
    ("unwritten_copy_out", r"DataCopy: src reads byte 60 of VECCALC TBuf 0, which was never written", {}),
    ("unwritten_scalar", r"LocalTensor.GetValue: the tensor reads byte 4 of VECCALC TBuf 0", {}),
]

ORDER_RULES = [
    # order of pipes
    (
        "raw_in_to_vector",
        r"Adds: RAW hazard: src \(PIPE_V\) reads UB bytes \[0, 256\) of VECCALC TBuf 0, which "
        r"DataCopy \(PIPE_MTE2\) writes, without SetFlag/WaitFlag<HardEvent::MTE2_V>",
        {},
    ),
    ("raw_vector_to_out", r"DataCopy: RAW hazard: src \(PIPE_MTE3\).*Duplicate \(PIPE_V\) writes.*V_MTE3", {}),
    ("war_vector_to_in", r"DataCopy: WAR hazard: dst \(PIPE_MTE2\).*Adds \(PIPE_V\) reads.*V_MTE2", {}),
    ("war_out_to_vector", r"Duplicate: WAR hazard: dst \(PIPE_V\).*DataCopy \(PIPE_MTE3\) reads.*MTE3_V", {}),
    ("waw_in_to_vector", r"Duplicate: WAW hazard: dst \(PIPE_V\).*DataCopy \(PIPE_MTE2\) writes.*MTE2_V", {}),
    ("wrong_direction", r"RAW hazard.*MTE2_V", {}),
    ("flag_set_too_early", r"RAW hazard.*MTE2_V", {}),
    ("chain", r"DataCopy: RAW hazard: src \(PIPE_MTE3\).*DataCopy \(PIPE_MTE2\) writes.*MTE2_MTE3", {}),
    ("second_reader", r"DataCopy: RAW hazard: src \(PIPE_MTE3\).*DataCopy \(PIPE_MTE2\) writes.*MTE2_MTE3", {}),
    ("barrier_of_one_pipe", r"RAW hazard.*MTE2_V", {}),
    ("queue_buffers_in_turn", r"WAR hazard|WAW hazard", {}),
    ("queue_not_used_for_order", r"RAW hazard.*VECIN queue 0 buffer 0.*MTE2_V", {}),
    ("waw_in_to_in", r"WAW hazard.*\[0, 256\).*on the same pipe, without PipeBarrier<PIPE_MTE2>", {}),
    ("waw_out_to_out", r"WAW hazard.*of GM buffer y.*on the same pipe, without PipeBarrier<PIPE_MTE3>", {}),
    ("raw_through_gm", r"RAW hazard.*of GM buffer y.*MTE3_MTE2", {}),
    ("manual_vector_barrier", r"RAW hazard.*on the same pipe, without PipeBarrier<PIPE_V>", MANUAL),
    ("manual_scalar_flag", r"LocalTensor.GetValue: RAW hazard.*HardEvent::V_S", MANUAL),
    # flags
    ("flag_without_wait", r"end of kernel: SetFlag V_MTE3 1 has no WaitFlag", {}),
    ("wait_without_set", r"WaitFlag: V_MTE3 1 was never set: PIPE_MTE3 would wait for ever", {}),
    ("wait_for_another_id", r"WaitFlag: V_MTE3 2 was never set", {}),
    ("set_twice", r"SetFlag: V_MTE3 1 is already set", {}),
    ("event_id_range", r"SetFlag: eventID is 8, outside \[0, 7\]", {}),
    ("event_of_another_core_kind", r"SetFlag: HardEvent::M_FIX is not a documented event of this kind of core", {}),
    ("event_id_of_a_queue", r"SetFlag: event id 0 of MTE2_V belongs to a queue", {}),
    ("event_id_not_released", r"end of kernel: AllocEventID MTE2_V 0 has no ReleaseEventID", {}),
    ("event_id_not_allocated", r"ReleaseEventID: event id 1 of MTE2_V was not allocated", {}),
    ("event_ids_run_out", r"AllocEventID: all 8 event ids of MTE2_V are taken", {}),
    # GM and atomics
    ("gm_unwritten", r"DataCopy: src reads byte 0 of GM buffer y, which was never written", {}),
    ("gm_scalar_after_write", r"GlobalTensor.GetValue: byte 12 of GM buffer y was written in this launch", {}),
    ("atomic_on_unwritten", r"DataCopy: dst adds to byte 0 of GM buffer y, which was never written", {}),
    ("atomic_of_another_type", r"DataCopy: dst is a tensor of float under SetAtomicAdd<half>", {"y": "inout"}),
    ("atomic_left_on", r"end of kernel: SetAtomicAdd is still on", {}),
    # several cores
    (
        "two_writers",
        r"AIV 1 .*WAW hazard.*GM buffer y, which DataCopy of AIV 0 \(block 0, sub-block 0\) writes, "
        r"without CrossCoreSetFlag",
        {"blocks": 2},
    ),
    ("atomic_and_plain", r"WAW hazard.*GM buffer y.*of AIV 0", {**MIX_VECTORS, "y": "inout"}),
    ("read_without_sync", r"AIV 1 .*RAW hazard.*GM buffer y, which DataCopy of AIV 0", MIX_VECTORS),
    ("flag_of_another_pipe", r"RAW hazard.*GM buffer y, which DataCopy of AIV . ", MIX_VECTORS),
    ("write_after_read", r"AIV 0 .*WAR hazard.*GM buffer y, which DataCopy of AIV 1 .* reads", MIX_VECTORS),
    ("sync_in_vector_only_kernel", r"SyncAll: kernels of type KERNEL_TYPE_AIV_ONLY", {}),
    ("sync_not_by_all", r"AIV 0 .*SyncAll: waits for ever", MIX_VECTORS),
    ("cross_flag_never_set", r"CrossCoreWaitFlag\(1\): waits for ever", MIX_VECTORS),
    ("cross_flag_not_waited_for", r"end of kernel: cross-core flag 1 was set and not waited for", MIX_VECTORS),
    ("cross_flag_not_answered", r"CrossCoreSetFlag of flag 1 was not answered by all cores of its group", MIX_VECTORS),
    ("cross_flag_range", r"CrossCoreSetFlag: flagId is 16, outside \[0, 15\]", MIX_VECTORS),
    ("cross_flag_of_sync_all", r"SyncAll: SyncAll takes flags 11 to 14", MIX_VECTORS),
    ("cross_flag_counter", r"the counter of flag 1 on AIV 0 .* passes 15", MIX_VECTORS),
    (
        "more_cores_than_the_chip_has",
        r"SyncAll: 49 cores wait for one another on a chip of 48",
        {"blocks": 49, "kernel_type": "MIX_AIV_1_0"},
    ),
    ("mix_needs_all_vectors", r"AIC 0 \(block 0\): CrossCoreWaitFlag\(1\): waits for ever", MIX),
    ("mix_vector_on_cube", r"AIC 0 \(block 0\): Duplicate: runs on PIPE_V, which this kind of core does not have", MIX),
    ("mix_cube_pipe_on_vector", r"PipeBarrier: this kind of core has no PIPE_M", MIX),
    ("mix_sync_of_vectors_on_cube", r"SyncAll: SyncAll<true> is for vector cores", MIX),
    ("mix_vectors_meet", r"AIV 0 .*src reads byte 256 of GM buffer y, which was never written", MIX),
    ("mix_all_meet", r"AIC 0 .*src reads byte 0 of GM buffer y, which was never written", MIX),
    ("kernel_type", r"KERNEL_TASK_TYPE: the kernel asks for type 1, the launch is of type 0", {}),
]

RULES = [
    (library, *rule)
    for library, rules in (("buffer_rules", BUFFER_RULES), ("vector_rules", VECTOR_RULES), ("order_rules", ORDER_RULES))
    for rule in rules
]

CUBE_BREAKS = [
    r"LoadData: RAW hazard: src \(PIPE_MTE1\).*MTE2_MTE1",
    r"Mmad: RAW hazard: fm \(PIPE_M\).*MTE1_M",
    r"Fixpipe: RAW hazard: src \(PIPE_FIX\).*M_FIX",
    r"Mmad: RAW hazard: dst.*on the same pipe, without PipeBarrier<PIPE_M>",
    r"LoadData: WAR hazard: dst \(PIPE_MTE1\).*Mmad \(PIPE_M\) reads.*M_MTE1",
    r"LoadData: dst starts at address 32 of L0A, which is not a multiple of 512 bytes",
    r"Mmad: dst starts at address 512 of L0C, which is not a multiple of 1024 bytes",
    r"Mmad: fm reads byte 992 of A2 TBuf 2, which was never written",
    r"Mmad: fm reads (byte 2048|bytes \[.*\)) of A2 TBuf 2, which (was never written|has 2560)",
    r"Mmad: dst reads byte 0 of CO1 TBuf 4, which was never written",
    r"Fixpipe: src reads byte .* of CO1 TBuf 4, which was never written",
    r"Fixpipe: src reads byte 4096 of CO1 TBuf 4, which was never written",
    r"Fixpipe: dst is of type float, which needs quantPre NoQuant; it is F322F16",
    r"DataCopy\(Nd2Nz\): dstNzNStride is 0, outside \[1, 16384\]",
    r"Fixpipe: dstStride 31 is less than nSize 32: rows of dst overlap",
    r"Mmad: m is 4096, outside \[0, 4095\]",
    r"LoadData: dst is in L1 \(A1\), which this path does not support",
    r"LoadData: transposition is for 16-bit types",
    r"src reads bytes \[2016, 2080\) of GM buffer b, which has 2048",
    r"SetFlag: HardEvent::S_V is not a documented event of this kind of core",
    r"Mmad: isBias, cmatrixSource, unitFlag and kDirectionAlign are not modelled",
    r"DataCopy: src is in L0C \(CO1\), which this path does not support",
    r"DataCopy\(Nd2Nz\): two rows or column groups land on the same data block of dst",
]


@pytest.fixture
def run(libraries):
    """Runs a rule's kernel, broken or not."""

    def run_rule(library, name, bad, y="out", **options):
        arrays = np.ones(1024, np.float32), np.zeros(1024, np.float32)
        return libraries[library].run(
            name, [("x", arrays[0], "in"), ("y", arrays[1], y)], struct.pack("<i", bad), **options
        )

    return run_rule


@pytest.mark.parametrize("library, name, message, options", RULES, ids=[rule[1] for rule in RULES])
def test_a_broken_rule_is_refused(run, refused, library, name, message, options):
    with pytest.raises(refused, match=message) as caught:
        run(library, name, 1, **options)
    # The message starts with the core that broke the rule.
    assert str(caught.value).startswith(("AIV ", "AIC "))
    run(library, name, 0, **options)


def test_the_compiler_synchronizes_vector_and_scalar_by_default(run):
    for name in ("manual_vector_barrier", "manual_scalar_flag"):
        run("order_rules", name, 1)


def test_sums_that_stay_in_place(libraries):
    x, y = np.ones(1024, np.float32), np.zeros(1024, np.float32)
    libraries["vector_rules"].run("accumulate_first_source", [("x", x, "in"), ("y", y, "out")], struct.pack("<i", 0))
    assert np.all(y[:64] == 4)


def run_cube(libraries, name, broken, size=32):
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(size, 32)).astype(np.float16) for _ in range(2))
    c = np.zeros((size, size), np.float32)
    tiling = b"" if name == "large_product" else struct.pack("<i", broken)
    libraries["cube_rules"].run(name, [("a", a, "in"), ("b", b, "in"), ("c", c, "out")], tiling, kernel_type="AIC_ONLY")
    assert np.allclose(c, a.astype("f8") @ b.astype("f8").T, rtol=1e-5, atol=1e-5)


def test_the_product_without_a_break(libraries):
    run_cube(libraries, "product", 0)


@pytest.mark.parametrize("broken", range(1, len(CUBE_BREAKS) + 1))
def test_a_broken_product_is_refused(libraries, refused, broken):
    with pytest.raises(refused, match=CUBE_BREAKS[broken - 1]):
        run_cube(libraries, "product", broken)


def test_nan_into_a_product_is_refused(libraries, refused):
    for spoiled, message in (("a", "fm has NaN in row 3, column 1,"), ("b", "filter has NaN in row 1, column 3,")):
        a, b, c = np.ones((32, 32), "f2"), np.ones((32, 32), "f2"), np.zeros((32, 32), "f4")
        {"a": a, "b": b}[spoiled][3, 1] = np.nan
        with pytest.raises(refused, match=f"Mmad: {message} which may end in an error of execution"):
            gm = [("a", a, "in"), ("b", b, "in"), ("c", c, "out")]
            libraries["cube_rules"].run("product", gm, struct.pack("<i", 0), kernel_type="AIC_ONLY")


def test_large_products_need_no_barrier(libraries):
    run_cube(libraries, "large_product", 0, size=64)


def test_one_row_is_read_as_a_row(libraries, refused):
    rng = np.random.default_rng(2)
    a, b, c = rng.normal(size=32).astype("f2"), rng.normal(size=(16, 32)).astype("f2"), np.zeros(16, "f4")
    gm = [("a", a, "in"), ("b", b, "in"), ("c", c, "out")]
    libraries["cube_rules"].run("gemv", gm, struct.pack("<i", 0), kernel_type="AIC_ONLY")
    assert np.allclose(c, b.astype("f8") @ a.astype("f8"), rtol=1e-5, atol=1e-5)
    with pytest.raises(refused, match="fm reads byte 32 of A2 TBuf 1, which was never written"):
        libraries["cube_rules"].run("gemv", gm, struct.pack("<i", 1), kernel_type="AIC_ONLY")


def test_a_launch_must_fit_the_kernel(libraries, refused):
    x = np.ones(1024, np.float32)
    with pytest.raises(refused, match="the kernel takes 3 addresses, the launch passes 2"):
        libraries["buffer_rules"].run("copy_length", [("x", x, "in"), ("y", x.copy(), "out")])
    with pytest.raises(refused, match="GET_TILING_DATA: the structure has 4 bytes, the launch passed 8"):
        libraries["buffer_rules"].run("copy_length", [("x", x, "in"), ("y", x.copy(), "out")], bytes(8))
    with pytest.raises(refused, match="no kernel nothing"):
        libraries["buffer_rules"].run("nothing", [])


@pytest.mark.parametrize("registered", (True, False))
def test_a_kernel_must_register_its_tiling(build, tmp_path, registered):
    """CANN's compiler would not know its layout."""
    lines = ['#include "kernel_operator.h"', '#include "model/python_entry.h"', "void k(GM_ADDR x, GM_ADDR tiling) {"]
    lines += ["REGISTER_TILING_DEFAULT(int32_t);"] * registered
    lines += ["GET_TILING_DATA_WITH_STRUCT(int32_t, flag, tiling);", "}", "ASCENDC_MODEL_KERNEL(k);", ""]
    (tmp_path / "k.cpp").write_text("\n".join(lines))
    if registered:
        build(tmp_path / "k.cpp", tmp_path / "k.so", ("-O0",))
    else:
        with pytest.raises(RuntimeError, match="AscendcModelTiling.* was not declared"):
            build(tmp_path / "k.cpp", tmp_path / "k.so", ("-O0",))
