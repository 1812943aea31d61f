"""lora_linear for 2 to 16 tokens, on the cube cores in the simulator (not CANN and not an NPU)."""

import numpy as np
import pytest

from tests.support.ascend_arrays import LEAST, ROUNDING, each_rank, empty, moved, normal, store, widen
from tests.support.ascendc_model import kernels

DTYPES = ("float16", "bfloat16")
# Two rows are the fewest that do not make a vector; 16 fill a row of fractals.
TOKENS = (2, 15, 16)
CORES = ((24, 48), (20, 40), (1, 2))
VECTOR, CUBE = 1, 2


@pytest.fixture(scope="module")
def run():
    """Runs the kernel on (x, w, a, b, bias or None); returns y and the report."""

    def run_kernel(dtype, arrays, scale=0.75, cores=CORES[0]):
        x, w, a, _, bias = arrays
        sizes = (len(x), x.shape[1], len(w), len(a), int(bias is not None))
        assert kernels.plan("lora_linear", dtype, sizes, *cores)[0].tiling_key == CUBE
        y = empty(dtype, len(x), len(w))
        inputs = list(zip(("x", "w", "a", "b", "scale", "bias"), (*arrays[:4], np.array([scale], np.float32), bias)))
        report = kernels.run("lora_linear", dtype, inputs, [("y", y, "out")], sizes, *cores)
        assert report["unwritten"]["y"] == 0
        return y, report

    return run_kernel


@pytest.fixture(scope="module")
def check(run, reference):
    """Runs the kernel and compares it with the oracle: y is rounded once, and so is the rank-r tensor."""

    def check_kernel(dtype, arrays, scale=0.75, cores=CORES[0]):
        y, report = run(dtype, arrays, scale, cores)
        x, w, a, b = (widen(array, dtype) for array in arrays[:4])
        bias = np.zeros(len(w)) if arrays[4] is None else widen(arrays[4], dtype)
        oracle = reference("lora_linear").lora_linear
        want = oracle(x, w, a, b, scale, bias)
        magnitude = oracle(*map(np.abs, (x, w, a, b)), abs(scale), np.abs(bias))
        low = np.abs(x @ a.T * scale) @ np.abs(b.T)
        allowed = 1.001 * ROUNDING[dtype] * (np.abs(want) + low) + 16 * 2.0**-24 * magnitude + LEAST[dtype]
        error = np.abs(widen(y, dtype) - want)
        assert np.all(error <= allowed), (
            f"{np.sum(~(error <= allowed))} of {error.size} are off, at worst {np.max(error / allowed):.3g} of what is "
            "allowed"
        )
        return report

    return check_kernel


def arrays_of(dtype, tokens, k, n, rank, with_bias=True):
    arrays = normal(tokens + rank, dtype, (tokens, k), (n, k), (rank, k), (n, rank), (n,))
    return arrays if with_bias else arrays[:4] + [None]


@pytest.mark.parametrize("dtype, rank", each_rank(DTYPES))
@pytest.mark.parametrize("tokens", TOKENS)
def test_equals_the_oracle(check, dtype, rank, tokens):
    for (k, n), cores, with_bias in zip(((100, 31), (257, 130), (515, 801)), CORES, (False, True, tokens == 15)):
        check(dtype, arrays_of(dtype, tokens, k, n, rank, with_bias), cores=cores)


@pytest.mark.parametrize("cores", [(1, 2), (2, 4), (7, 14), (20, 40), (24, 48), (24, 40)])
def test_any_number_of_cores(check, cores):
    """N is a multiple of 16 x cores, or one more."""
    check("float16", arrays_of("float16", 5, 16 * 24, 16 * 24, 13), 2.0, cores)
    check("float16", arrays_of("float16", 5, 16 * 24 + 1, 16 * 24 + 1, 13), 2.0, cores)


@pytest.mark.parametrize("k, n", [(1, 1), (1, 300), (300, 1), (16, 16), (5000, 17), (17, 5000)])
def test_any_width(check, k, n):
    """Also more rows of W on one core than it has room for sums."""
    for cores in CORES:
        check("float16", arrays_of("float16", 7, k, n, 16), 0.25, cores)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", (0.0, -2.0, 1e-3))
def test_scale(check, dtype, scale):
    check(dtype, arrays_of(dtype, 8, 257, 130, 8), scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_passes_unchanged(run, dtype):
    """If all else is zero, every bit of the bias passes through the cube, infinities included."""
    x, w, a, b, bias = arrays_of(dtype, 6, 48, 77, 8)
    largest = 6e4 if dtype == "float16" else 1e38
    bias = store(widen(bias, dtype) * np.geomspace(2.0**-10, largest / 5, bias.size), dtype)
    bias[[3, 70]] = store(np.array([np.inf, -np.inf]), dtype)
    y, _ = run(dtype, (x, np.zeros_like(w), a, b, bias), 0.0)
    assert np.array_equal(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time(run, dtype):
    arrays = arrays_of(dtype, 8, 515, 801, 16)
    first, second = (run(dtype, arrays)[0] for _ in range(2))
    assert np.array_equal(first, second)


def test_every_input_matters(run):
    arrays = arrays_of("float16", 4, 64, 64, 8)
    y = run("float16", arrays, 1.0)[0]
    for i in range(5):
        other = arrays[:i] + [-arrays[i]] + arrays[i + 1 :]
        assert not np.array_equal(y, run("float16", other, 1.0)[0])
    assert not np.array_equal(y, run("float16", arrays, 1.5)[0])
    assert np.array_equal(y, run("float16", arrays[:3] + [-arrays[3], arrays[4]], -1.0)[0])


@pytest.mark.parametrize("rank", (8, 16, 64))
def test_little_more_than_the_least_bytes_are_moved(run, rank):
    d, tokens = 5120, 8
    report = run("bfloat16", arrays_of("bfloat16", tokens, d, d, rank, False))[1]
    least = 2 * (d * d + 2 * d * rank + 2 * d * tokens) + 4
    assert least <= moved(report) <= 1.05 * least
    assert report["gm"]["w"]["read"] == 2 * d * d
    assert report["gm"]["a"]["read"] == report["gm"]["b"]["read"] == 2 * d * rank
    # The cube cores have equal shares of W, to within a fractal.
    rows = [core["gm"]["w"]["read"] // (2 * d) for core in report["cores"] if core["name"].startswith("AIC")]
    assert len(rows) == 24 and max(rows) - min(rows) <= 16 and min(rows) > 0


def test_what_stays_with_the_vector_cores():
    def way(dtype, *sizes):
        return kernels.plan("lora_linear", dtype, (*sizes, 16, 1))[0].tiling_key

    assert way("float16", 2, 4096, 4096) == way("bfloat16", 16, 4096, 4096) == CUBE
    assert way("float16", 1, 4096, 4096) == way("bfloat16", 17, 4096, 4096) == VECTOR
    assert way("float32", 8, 4096, 4096) == VECTOR
    assert way("bfloat16", 8, 65535, 100000) == CUBE
    assert way("bfloat16", 8, 65536, 4096) == VECTOR
