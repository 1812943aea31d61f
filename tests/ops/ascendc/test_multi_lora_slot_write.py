"""multi_lora_slot_write on the vector cores in the simulator (not CANN and not an NPU)."""

import numpy as np
import pytest

from tests.support.ascend_arrays import DTYPES, moved, normal
from tests.support.ascendc_model import kernels

SLOTS = 4


@pytest.fixture(scope="module")
def run():
    """Writes packed into a slot of (pool, ranks, scales), in place; returns the output and the report."""

    def run_kernel(dtype, state, slot, packed, scale, cores=48):
        written = np.zeros(1, np.int32)
        # The same tensors twice, as CANN passes an output that has the name of an input.
        names = ("pool", "ranks", "scales")
        before = [(name, array, "in") for name, array in zip(names, state)]
        inputs = [("slot", np.int32([slot]), "in"), ("packed", packed, "in"), ("scale", np.float32([scale]), "in")]
        outputs = [(f"{name}_ref", array, "inout") for name, array in zip(names, state)]
        sizes = (*state[0].shape, len(packed))
        plan, tiling = kernels.plan("multi_lora_slot_write", dtype, sizes, cores // 2, cores)
        library, _ = kernels.build("multi_lora_slot_write", dtype)
        results = [*outputs, ("written", written, "out"), ("workspace", np.zeros(32, np.uint8), "out")]
        report = library.run(
            "multi_lora_slot_write",
            [*before, *inputs, *results],
            tiling=tiling,
            blocks=plan.blocks,
            kernel_type=kernels.KINDS[plan.kind],
        )
        assert not {"pool", "ranks", "scales"} & set(report["gm"])
        assert report["unwritten"]["written"] == 0
        return written[0], report

    return run_kernel


def state_of(dtype, max_rank, columns):
    return [normal(1, dtype, (SLOTS, max_rank, columns)), np.int32([1, 2, 0, 16]), np.float32([1, 2, 3, 4])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", (1, 8, 13, 16, 64, 128, 256))
@pytest.mark.parametrize("columns", (1, 31, 257, 2048))
def test_the_slot_and_nothing_else_is_written(run, reference, dtype, rank, columns):
    for slot, scale, cores in ((1, 0.5, 48), (SLOTS - 1, -2.0, 7), (0, 0.0, 1)):
        state = state_of(dtype, rank if slot == 1 else 256, columns)
        expected = [array.copy() for array in state]
        packed = normal(rank, dtype, (rank, columns))
        reference("multi_lora_slot_write").multi_lora_slot_write(*expected, slot, packed, scale)
        written, report = run(dtype, state, slot, packed, scale, cores)
        assert written == slot
        for array, wanted in zip(state, expected):
            np.testing.assert_array_equal(array, wanted)
        assert report["gm"]["packed"]["read"] == report["gm"]["pool_ref"]["written"] == packed.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot", (-1, SLOTS, 2**31 - 1, -(2**31)))
def test_a_slot_outside_the_pool_writes_nothing(run, dtype, slot):
    state = state_of(dtype, 16, 300)
    before = [array.copy() for array in state]
    written, report = run(dtype, state, slot, normal(2, dtype, (13, 300)), 0.5)
    assert written == -1
    for array, wanted in zip(state, before):
        np.testing.assert_array_equal(array, wanted)
    assert all(
        report["gm"].get(name, {"written": 0})["written"] == 0 for name in ("pool_ref", "ranks_ref", "scales_ref")
    )


def test_what_was_written_is_what_is_computed_with(run, reference):
    """A write, then multi_lora_delta on the same pool."""
    k, n, rank = 100, 131, 13
    state = state_of("float32", 16, k + n)
    y0, x, packed = normal(3, "float32", (2, n), (2, k), (rank, k + n))
    run("float32", state, 2, packed, 0.5)
    y, indices = np.zeros_like(y0), np.int32([2, -1])
    inputs = [("y0", y0), ("x", x), *zip(("pool", "ranks", "scales"), state), ("indices", indices)]
    kernels.run("multi_lora_delta", "float32", inputs, [("y", y, "out")], (2, SLOTS, 16, k, n))
    want = reference("multi_lora_delta").multi_lora_delta(y0, x, *state, indices)
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)
    assert np.array_equal(y[1], y0[1]) and not np.array_equal(y[0], y0[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_cores_copy_a_large_adapter_once(run, dtype):
    state = state_of(dtype, 16, 8192)
    packed = normal(4, dtype, (16, 8192))
    _, report = run(dtype, state, 1, packed, 1.0)
    written = [core["gm"].get("pool_ref", {"written": 0})["written"] for core in report["cores"]]
    assert len(written) == 48 and min(written) > 0 and max(written) <= 2 * np.mean(written)
    assert moved(report) <= 2 * packed.nbytes + 1024
