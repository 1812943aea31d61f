"""multi_lora_delta on the cube cores in the simulator (not CANN and not an NPU)."""

import numpy as np
import pytest

from tests.support.ascend_arrays import ROUNDING, each_rank, empty, moved, normal, store, widen
from tests.support.ascendc_model import kernels

DTYPES = ("float16", "bfloat16")
NAMES = ("y0", "x", "pool", "ranks", "scales", "indices")
RANKS = (1, 8, 13, 16, 64, 0, 33)
PREFILL = 2
KINDS = {  # which of 7 slots each of t tokens uses
    "identical": lambda t: np.full(t, 4),
    "segments": lambda t: np.arange(t) * 7 // t,
    "interleaved": lambda t: np.arange(t) % 7,
    "skewed": lambda t: np.random.default_rng(t).zipf(1.5, t) % 8 - 1,
    "single rows": lambda t: np.where(np.arange(t) % 63 == 5, np.arange(t) % 7, 2),
    "none": lambda t: np.full(t, -1),
}


@pytest.fixture(scope="module")
def run():
    """Runs the kernel on its six inputs; returns y and the report."""

    def run_kernel(dtype, inputs, cube_cores=24):
        (tokens, n), (slots, max_rank, _) = inputs[0].shape, inputs[2].shape
        sizes = (tokens, slots, max_rank, inputs[1].shape[1], n)
        assert kernels.plan("multi_lora_delta", dtype, sizes, cube_cores, 2 * cube_cores)[0].tiling_key == PREFILL
        y = empty(dtype, tokens, n)
        report = kernels.run(
            "multi_lora_delta", dtype, list(zip(NAMES, inputs)), [("y", y, "out")], sizes, cube_cores, 2 * cube_cores
        )
        assert report["unwritten"]["y"] == 0
        return y, report

    return run_kernel


def case(dtype, indices, ranks=RANKS, k=100, n=54, max_rank=None):
    """The six inputs. Rows of the pool beyond the true ranks are NaN: they must not enter any sum."""
    tokens, slots, max_rank = len(indices), len(ranks), max_rank or max(ranks)
    y0, x, pool = normal(tokens, dtype, (tokens, n), (tokens, k), (slots, max_rank, k + n))
    for block, rank in zip(pool, ranks):
        block[rank:] = store(np.nan, dtype)
    return [y0, x, pool, np.int32(ranks), np.linspace(-1, 1.5, slots, dtype=np.float32), np.int32(indices)]


def assert_near(reference, dtype, y, inputs):
    """y is rounded once, and so is each row's rank-r tensor; sums are float32."""
    y0, x, pool = (widen(array, dtype) for array in inputs[:3])
    ranks, scales, indices = inputs[3:]
    want = reference("multi_lora_delta").multi_lora_delta(y0, x, pool, ranks, scales, indices)
    allowed = ROUNDING[dtype] * np.abs(want) * 1.001
    for t, i in enumerate(indices):
        if i >= 0:
            a, b = np.split(pool[i, : ranks[i]], [x.shape[1]], axis=1)
            allowed[t] += 1.001 * ROUNDING[dtype] * (np.abs(scales[i] * (a @ x[t])) @ np.abs(b))
            allowed[t] += 16 * 2.0**-24 * (np.abs(scales[i]) * (np.abs(a) @ np.abs(x[t])) @ np.abs(b))
    error = np.abs(widen(y, dtype) - want)
    assert np.all(error <= allowed), f"{np.sum(~(error <= allowed))} of {error.size} are off"


@pytest.mark.parametrize("dtype, kind", [*(("float16", kind) for kind in KINDS), ("bfloat16", "skewed")])
def test_every_popularity(run, reference, dtype, kind):
    # The cube takes fewer tokens than 129 where they share slots.
    for tokens, cores in ((9, 1), (70, 2), (129, 24), (200, 3)):
        inputs = case(dtype, KINDS[kind](tokens))
        y, _ = run(dtype, inputs, cores)
        assert_near(reference, dtype, y, inputs)


@pytest.mark.parametrize("dtype, rank", each_rank(DTYPES))
def test_every_rank(run, reference, dtype, rank):
    for k, n, max_rank in ((100, 31, rank), (257, 130, 256)):
        inputs = case(dtype, np.arange(130) // 40 % 3, (rank, max(1, rank - 1), rank), k, n, max_rank)
        y, _ = run(dtype, inputs, 20)
        assert_near(reference, dtype, y, inputs)


@pytest.mark.parametrize("cores", (1, 2, 7, 20, 24))
@pytest.mark.parametrize("k, n", [(1, 1), (300, 17), (17, 300), (16 * 24, 16 * 24)])
def test_any_cores_and_widths(run, reference, cores, k, n):
    inputs = case("float16", KINDS["skewed"](150), k=k, n=n)
    y, _ = run("float16", inputs, cores)
    assert_near(reference, "float16", y, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_that_do_not_exist_give_nan(run, reference, dtype):
    indices = np.arange(140) % 7
    indices[[3, 70, 139]] = (7, 2**31 - 1, 1000)
    inputs = case(dtype, indices)
    y, _ = run(dtype, inputs)
    bad = indices > 6
    assert np.all(np.isnan(widen(y, dtype)[bad]))
    good = [array[~bad] if i in (0, 1, 5) else array for i, array in enumerate(inputs)]
    assert_near(reference, dtype, y[~bad], good)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (54, 9000))
def test_rows_without_an_adapter_are_y0(run, dtype, n):
    """To the last bit, NaN, infinity and -0 too: no product is made of them."""
    inputs = case(dtype, np.where(np.arange(150) % 3 == 0, -1, 5), k=20, n=n)
    inputs[0][::3, [0, 17, 30, n - 1]] = store([np.nan, -np.inf, -0.0, np.inf], dtype)
    y, _ = run(dtype, inputs)
    assert np.array_equal(y.view(np.uint16), inputs[0].view(np.uint16))


def test_same_bits_whatever_the_other_rows(run):
    """A row's result does not depend on the order of the rows around it."""
    inputs = case("float16", KINDS["skewed"](160))
    y, _ = run("float16", inputs)
    assert np.array_equal(y, run("float16", inputs)[0])
    order = np.random.default_rng(0).permutation(160)
    mixed = [array[order] if i in (0, 1, 5) else array for i, array in enumerate(inputs)]
    assert np.array_equal(run("float16", mixed)[0], y[order])


def test_bytes_moved(run):
    """Four segments of 128 tokens: near the minimum, with most cores busy."""
    tokens, size, rank = 512, 2048, 16
    inputs = case("float16", np.arange(tokens) // 128, (rank,) * 4, size, size)
    _, report = run("float16", inputs)
    least = 2 * (3 * tokens * size + 4 * rank * 2 * size)
    assert moved(report) <= 1.15 * least
    assert report["cores_that_worked"] >= 48


def test_what_stays_with_the_vector_cores():
    def way(dtype, tokens, k, n, max_rank=16, slots=200, cores=(24, 48)):
        return kernels.plan("multi_lora_delta", dtype, (tokens, slots, max_rank, k, n), *cores)[0].tiling_key

    assert way("float16", 129, 4096, 4096) == PREFILL
    assert way("float16", 128, 4096, 4096) != PREFILL  # each row may have an adapter of its own
    for tokens, slots in ((8, 1), (16, 1), (64, 4), (128, 7)):  # rows share adapters
        assert way("float16", tokens, 4096, 4096, 64, slots) == PREFILL
    assert way("float16", 64, 4096, 4096, 64, 32) != PREFILL
    assert way("float32", 512, 4096, 4096) != PREFILL
    assert way("bfloat16", 512, 32768, 32767, 256) == PREFILL
    assert way("bfloat16", 512, 32768, 32768) != PREFILL
    for cores in ((0, 1), (0, 48), (1, 1)):  # a cube core needs two vector cores
        assert way("bfloat16", 512, 4096, 4096, cores=cores) != PREFILL
