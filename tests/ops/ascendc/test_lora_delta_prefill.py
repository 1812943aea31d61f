"""lora_delta on the cube cores in the simulator (not CANN and not an NPU)."""

import numpy as np
import pytest

from tests.support.ascend_arrays import ROUNDING, each_rank, empty, moved, normal, store, widen
from tests.support.ascendc_model import kernels

DTYPES = ("float16", "bfloat16")
# Odd tails, one row in the last tile, several tiles.
TOKENS = (17, 31, 64, 129)
PREFILL = 2


@pytest.fixture(scope="module")
def run():
    """Runs the kernel on (y0, x, a, b); returns y and the report."""

    def run_kernel(dtype, arrays, scale, cube_cores=24, vector_cores=48):
        y0, x, a, b = arrays
        sizes = (len(x), x.shape[1], y0.shape[1], len(a))
        assert kernels.plan("lora_delta", dtype, sizes, cube_cores, vector_cores)[0].tiling_key == PREFILL
        y = empty(dtype, *y0.shape)
        inputs = list(zip(("y0", "x", "a", "b", "scale"), (*arrays, np.array([scale], np.float32))))
        report = kernels.run("lora_delta", dtype, inputs, [("y", y, "out")], sizes, cube_cores, vector_cores)
        assert report["unwritten"]["y"] == 0
        return y, report

    return run_kernel


def arrays_of(dtype, tokens, k, n, rank):
    return normal(tokens + rank, dtype, (tokens, n), (tokens, k), (rank, k), (n, rank))


def assert_near(reference, dtype, y, arrays, scale):
    """y is rounded once, and so is the rank-r tensor; sums are float32."""
    y0, x, a, b = (widen(array, dtype) for array in arrays)
    want = reference("lora_delta").lora_delta(y0, x, a, b, scale)
    low = np.abs(x @ a.T * scale) @ np.abs(b.T)
    magnitude = np.abs(y0) + (np.abs(x) @ np.abs(a.T) * abs(scale)) @ np.abs(b.T)
    allowed = 1.001 * ROUNDING[dtype] * (np.abs(want) + low) + 16 * 2.0**-24 * magnitude
    error = np.abs(widen(y, dtype) - want)
    assert np.all(error <= allowed), f"{np.sum(~(error <= allowed))} of {error.size} are off, {np.max(error / allowed)}"


@pytest.mark.parametrize("dtype, rank", each_rank(DTYPES))
@pytest.mark.parametrize("tokens", TOKENS)
def test_matches_the_oracle(run, reference, dtype, rank, tokens):
    cores = {17: 24, 31: 2, 64: 20, 129: 24}[tokens]
    for k, n in ((100, 31), (257, 130)):
        arrays = arrays_of(dtype, tokens, k, n, rank)
        y, _ = run(dtype, arrays, -0.5, cores, 2 * cores)
        assert_near(reference, dtype, y, arrays, -0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", (2, 9, 16))
def test_few_tokens(run, reference, dtype, tokens):
    """One row of fractals, on chips of so few vector cores that these would take longer."""
    for rank, (k, n), cores in ((13, (1030, 517), 1), (64, (515, 301), 2), (256, (100, 260), 1)):
        arrays = arrays_of(dtype, tokens, k, n, rank)
        y, _ = run(dtype, arrays, 1.5, cores, 2 * cores)
        assert_near(reference, dtype, y, arrays, 1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cube_cores, vector_cores", [(1, 2), (2, 4), (7, 14), (20, 40), (24, 48), (24, 40)])
def test_any_number_of_cores(run, reference, dtype, cube_cores, vector_cores):
    arrays = arrays_of(dtype, 145, 16 * 24, 16 * 24 + 1, 13)
    y, report = run(dtype, arrays, 2.0, cube_cores, vector_cores)
    assert_near(reference, dtype, y, arrays, 2.0)
    assert report["cores_that_worked"] <= cube_cores + vector_cores


@pytest.mark.parametrize("k, n", [(1, 1), (1, 300), (300, 1), (16, 16), (2100, 17), (17, 2100)])
def test_any_width(run, reference, k, n):
    arrays = arrays_of("float16", 33, k, n, 16)
    for cores in (1, 24):
        y, _ = run("float16", arrays, 0.25, cores, 2 * cores)
        assert_near(reference, "float16", y, arrays, 0.25)


def test_more_parts_than_cores(run, reference):
    """A and B of rank 256 do not fit into the L1 of one core, which loads their slices one after another."""
    arrays = arrays_of("bfloat16", 17, 1700, 1000, 256)
    y, _ = run("bfloat16", arrays, 0.125, 1, 2)
    assert_near(reference, "bfloat16", y, arrays, 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
def test_y0_passes_unchanged(run, dtype):
    """With scale 0 every bit of y0 passes through the cube unchanged, whatever its magnitude."""
    arrays = arrays_of(dtype, 70, 48, 77, 8)
    with np.errstate(over="ignore"):
        largest = 6e4 if dtype == "float16" else 1e38
        arrays[0] = store(
            widen(arrays[0], dtype) * np.geomspace(2.0**-10, largest / 5, arrays[0].size).reshape(arrays[0].shape),
            dtype,
        )
    y, _ = run(dtype, arrays, 0.0)
    assert np.array_equal(y, arrays[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time(run, dtype):
    arrays = arrays_of(dtype, 100, 300, 200, 16)
    first, second = (run(dtype, arrays, 0.7)[0] for _ in range(2))
    assert np.array_equal(first, second)


def test_adapter_and_scale_matter(run):
    arrays = arrays_of("float16", 40, 64, 64, 8)
    y = run("float16", arrays, 1.0)[0]
    other_b = arrays[:3] + [-arrays[3]]
    assert not np.array_equal(y, run("float16", other_b, 1.0)[0])
    assert not np.array_equal(y, run("float16", arrays, 1.5)[0])
    assert np.array_equal(y, run("float16", other_b, -1.0)[0])


@pytest.mark.parametrize(
    "size, rank, most",
    [(4096, 8, 1.06), (4096, 16, 1.11), (5120, 8, 1.05), (5120, 16, 1.09), (4096, 64, 1.32), (5120, 64, 1.28)],
)
def test_bytes_moved(run, size, rank, most):
    """Near the minimum (each input once, y once) with all cores busy. At rank 64 the cache serves the rest."""
    tokens = 512
    arrays = normal(0, "float16", (tokens, size), (tokens, size), (rank, size), (size, rank))
    _, report = run("float16", arrays, 1.0)
    least = 2 * (3 * tokens * size + 2 * rank * size)
    assert moved(report) <= most * least
    assert report["cores_that_worked"] >= 60


def test_what_stays_with_the_vector_cores():
    def way(dtype, *sizes, cores=(24, 48)):
        return kernels.plan("lora_delta", dtype, sizes, *cores)[0].tiling_key

    assert way("float16", 17, 4096, 4096, 16) == PREFILL
    assert way("float16", 16, 4096, 4096, 16) == way("float16", 8, 4096, 4096, 64) == PREFILL
    assert way("float16", 2, 4096, 4096, 16) != PREFILL  # bound by bytes on the vector cores too
    assert way("float16", 16, 100, 31, 16) != PREFILL  # too little work
    assert way("float32", 512, 4096, 4096, 16) != PREFILL
    assert way("bfloat16", 512, 65535, 65535, 256) == PREFILL
    assert way("bfloat16", 512, 65536, 4096, 16) != PREFILL
    assert way("bfloat16", 512, 4096, 65536, 16) != PREFILL
    for cores in ((0, 1), (0, 48), (1, 1)):  # a cube core needs two vector cores
        assert way("bfloat16", 512, 4096, 4096, 16, cores=cores) != PREFILL
