"""lora_linear on the vector cores in the simulator: one token, more than 16, and any number in float32."""

import itertools

import numpy as np
import pytest

from tests.support.ascend_arrays import DTYPES, assert_rounded_once, each_rank, empty, moved, normal, widen
from tests.support.ascendc_model import kernels

# K, N: less than a data block, ragged, and a multiple of 16 x cores.
SIZES = ((1, 1), (100, 31), (257, 130), (515, 801), (256, 768))
CORES = ((24, 48), (20, 40), (1, 2))
# Numbers of tokens that the vector cores compute, not the cube cores.
SOME = {"float32": 3, "float16": 17, "bfloat16": 17}
VECTOR = 1


@pytest.fixture
def run(reference):
    """Runs the operator, compares the result with the oracle, and returns (y as stored, report)."""

    def run(dtype, tokens, k, n, rank, scale=0.75, with_bias=True, cores=CORES[0]):
        x, w, a, b, bias = normal(0, dtype, (tokens, k), (n, k), (rank, k), (n, rank), (n,))
        bias = bias if with_bias else None
        y = empty(dtype, tokens, n)
        sizes = (tokens, k, n, rank, int(with_bias))
        assert kernels.plan("lora_linear", dtype, sizes, *cores)[0].tiling_key == VECTOR
        report = kernels.run(
            "lora_linear",
            dtype,
            [("x", x), ("w", w), ("a", a), ("b", b), ("scale", np.array([scale], np.float32)), ("bias", bias)],
            [("y", y, "out")],
            sizes,
            *cores,
        )
        assert report["unwritten"]["y"] == 0
        values = [widen(array, dtype) for array in (x, w, a, b)]
        bias = widen(bias, dtype) if with_bias else np.zeros(n)
        oracle = reference("lora_linear").lora_linear
        assert_rounded_once(
            y, oracle(*values, scale, bias), oracle(*map(np.abs, values), abs(scale), np.abs(bias)), dtype
        )
        return y, report

    return run


@pytest.mark.parametrize("dtype, rank", each_rank(DTYPES))
def test_equals_the_oracle(run, dtype, rank):
    for (k, n), tokens in itertools.product(SIZES[:4], (1, SOME[dtype])):
        run(dtype, tokens, k, n, rank, with_bias=tokens == 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cores", CORES)
def test_any_number_of_cores(run, dtype, cores):
    for number, (k, n) in enumerate(SIZES):
        run(dtype, SOME[dtype], k, n, 16, with_bias=number % 2 == 0, cores=cores)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, rank", ((18, 13), (32, 16), (50, 8), (30, 256)))
def test_tokens(run, dtype, tokens, rank):
    """Also more tokens than fit on chip at a time."""
    run(dtype, tokens, 257, 130, rank)
    run(dtype, tokens, 100, 31, rank)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_and_many_rows(run, dtype):
    """A K so large that no whole row fits on chip, and more rows of W than there is room for sums."""
    run(dtype, 1, 20011, 33, 8)
    run(dtype, SOME[dtype], 65, 6100, 64, cores=(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(run, dtype):
    for scale in (0.0, -2.0, 1e-3):
        run(dtype, 1, 100, 31, 8, scale)
        run(dtype, 1, 257, 801, 8, scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_token(dtype):
    w, a, b = normal(1, dtype, (31, 100), (8, 100), (31, 8))
    y = empty(dtype, 0, 31)
    report = kernels.run(
        "lora_linear",
        dtype,
        [("x", empty(dtype, 0, 100)), ("w", w), ("a", a), ("b", b), ("scale", np.ones(1, np.float32)), ("bias", None)],
        [("y", y, "out")],
        (0, 100, 31, 8, 0),
    )
    assert moved(report) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_twice(run, dtype):
    first, second = (run(dtype, SOME[dtype], 515, 801, 16)[0] for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("cores", [(0, 1), (0, 7), (1, 1)])
def test_a_chip_without_cube_cores(run, cores):
    """Its vector cores compute what the cube cores of another chip would."""
    run("float16", 7, 257, 130, 16, cores=cores)


def test_one_core_exchanges_nothing(run):
    report = run("float16", 1, 100, 31, 8)[1]
    assert report["cores_that_worked"] == 1 and report["gm"].get("workspace", {}) in ({}, {"read": 0, "written": 0})


@pytest.mark.parametrize("d", (4096,))
def test_little_more_than_the_least_bytes_are_moved(run, d):
    rank = 16
    report = run("bfloat16", 1, d, d, rank, with_bias=False)[1]
    least = 2 * (d * d + 2 * d * rank + 2 * d) + 4
    assert least <= moved(report) <= 1.05 * least
    assert report["cores_that_worked"] == CORES[0][1]
    assert report["gm"]["w"]["read"] == 2 * d * d
    assert report["gm"]["a"]["read"] == report["gm"]["b"]["read"] == 2 * d * rank
