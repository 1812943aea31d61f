"""lora_delta on the vector cores in the simulator: a chip without cube cores, where the plan has no other way."""

import itertools

import numpy as np
import pytest

from tests.support.ascend_arrays import DTYPES, assert_rounded_once, each_rank, empty, moved, normal, widen
from tests.support.ascendc_model import kernels

# K, N: less than a data block, ragged, and a multiple of 16 x cores.
SIZES = ((1, 1), (100, 31), (257, 130), (2051, 1283), (1536, 768))
CORES = (48, 40, 1)


@pytest.fixture
def run(reference):
    """Runs the operator, compares the result with the oracle, and returns (y as stored, report)."""

    def run(dtype, tokens, k, n, rank, scale=0.75, cores=CORES[0], seed=0):
        y0, x, a, b = normal(seed, dtype, (tokens, n), (tokens, k), (rank, k), (n, rank))
        y = empty(dtype, tokens, n)
        report = kernels.run(
            "lora_delta",
            dtype,
            [("y0", y0), ("x", x), ("a", a), ("b", b), ("scale", np.array([scale], np.float32))],
            [("y", y, "out")],
            (tokens, k, n, rank),
            0,
            cores,
        )
        assert report["unwritten"]["y"] == 0
        values = [widen(array, dtype) for array in (y0, x, a, b)]
        oracle = reference("lora_delta").lora_delta
        assert_rounded_once(y, oracle(*values, scale), oracle(*map(np.abs, values), abs(scale)), dtype)
        return y, report

    return run


@pytest.mark.parametrize("dtype, rank", each_rank(DTYPES))
def test_equals_the_oracle(run, dtype, rank):
    for (k, n), tokens in itertools.product(SIZES, (1, 2, 7)):
        run(dtype, tokens, k, n, rank)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cores", CORES)
def test_any_number_of_cores(run, dtype, cores):
    for k, n in SIZES:
        run(dtype, 3, k, n, 16, cores=cores)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", (4, 8, 19))
def test_tokens(run, dtype, tokens):
    run(dtype, tokens, 1000, 515, 13)
    run(dtype, tokens, 300, 515, 256)


@pytest.mark.parametrize("tokens", (17, 48, 49, 130))
def test_many_tokens_in_float32(run, tokens):
    """Several passes over A and B, by all cores together or by each core for tokens of its own."""
    run("float32", tokens, 2051, 1283, 100, cores=6)
    for (k, n), rank in itertools.product(SIZES[1:3], (8, 64)):
        run("float32", tokens, k, n, rank)
    run("float32", tokens, 257, 130, 64, cores=2)


def test_more_rows_than_a_tile(run):
    """Several tiles of A and of B on each core, in rows and in columns."""
    run("float32", 2, 5000, 4000, 128, cores=2)
    run("float16", 5, 4100, 4100, 100, cores=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(run, dtype):
    for k, n in SIZES[1:4]:
        results = [run(dtype, 2, k, n, 8, scale)[0] for scale in (0.0, -2.0, 1e-3)]
        y0 = normal(0, dtype, (2, n), (2, k))[0]
        assert np.array_equal(results[0], y0)
        assert np.mean(results[1] != y0) > 0.9  # the delta is there


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_token(dtype):
    a, b = normal(1, dtype, (8, 100), (31, 8))
    y = empty(dtype, 0, 31)
    report = kernels.run(
        "lora_delta",
        dtype,
        [("y0", y), ("x", empty(dtype, 0, 100)), ("a", a), ("b", b), ("scale", np.ones(1, np.float32))],
        [("y", y, "out")],
        (0, 100, 31, 8),
    )
    assert moved(report) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", ((1, 2051, 1283, 16), (3, 257, 130, 64), (7, 1536, 768, 13)))
def test_the_same_bits_twice(run, dtype, sizes):
    first, second = run(dtype, *sizes)[0], run(dtype, *sizes)[0]
    assert first.tobytes() == second.tobytes()


def test_passes_together_and_alone():
    """The sizes of test_many_tokens_in_float32 cover both."""

    def together(tokens, k, n, rank, cores):
        return kernels.plan("lora_delta", "float32", (tokens, k, n, rank), 0, cores)[0].workspace > 0

    assert together(49, 257, 130, 64, 48)
    assert not together(49, 2051, 1283, 100, 6)


def test_cores_exchange_sums_only_where_it_pays(run):
    """A little work needs no exchange; more needs one, of at most the sums of the cores that shrink."""
    assert kernels.plan("lora_delta", "float16", (1, 257, 130, 8))[0].workspace == 0
    made, _ = kernels.plan("lora_delta", "float16", (1, 2051, 1283, 16))
    assert 0 < made.workspace < made.blocks * 16 * 4
    report = run("float16", 1, 2051, 1283, 16)[1]
    assert report["gm"]["workspace"]["written"] == made.workspace


@pytest.mark.parametrize("d, cores", [(5120, CORES[0]), (4096, CORES[1])])
@pytest.mark.parametrize("rank", (8, 16, 64))
def test_one_token_keeps_all_cores_busy(run, d, rank, cores):
    report = run("float16", 1, d, d, rank, cores=cores)[1]
    assert report["cores_that_worked"] == cores
    busiest = max(moved(core) for core in report["cores"])
    assert busiest <= 1.35 * moved(report) / cores


@pytest.mark.parametrize("tokens, d", [(1, 4096), (4, 5120)])
@pytest.mark.parametrize("rank", (8, 16, 64))
def test_little_more_than_the_least_bytes_are_moved(run, d, rank, tokens):
    report = run("bfloat16", tokens, d, d, rank)[1]
    least = 2 * (2 * d * rank + 3 * d * tokens) + 4
    assert least <= moved(report) <= 1.07 * least
    for name in ("a", "b", "x", "y0"):  # each once
        assert report["gm"][name]["read"] == 2 * (d * rank if name in "ab" else d * tokens)
