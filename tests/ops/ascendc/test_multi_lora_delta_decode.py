"""multi_lora_delta on the vector cores in the simulator: a chip without cube cores, where the plan has no other way."""

import itertools

import numpy as np
import pytest

from tests.support.ascend_arrays import (
    DTYPES,
    STORED,
    assert_rounded_once,
    each_rank,
    empty,
    moved,
    normal,
    over_the_bound,
    store,
    widen,
)
from tests.support.ascendc_model import kernels
from tests.support.pooled_adapters import KINDS, popularity

NAMES = ("y0", "x", "pool", "ranks", "scales", "indices")
TRUE_RANKS = (1, 8, 13, 16, 64, 0, 33)


@pytest.fixture(scope="module")
def run():
    """Runs the kernel on its six inputs; returns y and the report."""

    def run_kernel(dtype, inputs, cores=48):
        (tokens, n), (slots, max_rank, _) = inputs[0].shape, inputs[2].shape
        sizes = (tokens, slots, max_rank, inputs[1].shape[1], n)
        y = empty(dtype, tokens, n)
        report = kernels.run("multi_lora_delta", dtype, list(zip(NAMES, inputs)), [("y", y, "out")], sizes, 0, cores)
        assert report["unwritten"]["y"] == 0
        return y, report

    return run_kernel


def case(dtype, indices, ranks=TRUE_RANKS, k=37, n=54, max_rank=None, scales=None):
    """The six inputs. Rows of the pool beyond the true ranks are NaN: they must not enter any sum."""
    tokens, slots, max_rank = len(indices), len(ranks), max_rank or max(ranks)
    y0, x, pool = normal(tokens, dtype, (tokens, n), (tokens, k), (slots, max_rank, k + n))
    for block, rank in zip(pool, ranks):
        block[rank:] = store(np.nan, dtype)
    scales = np.linspace(-1, 1.5, slots) if scales is None else scales
    return [y0, x, pool, np.int32(ranks), np.float32(scales), np.int32(indices)]


def assert_near(reference, dtype, y, inputs):
    """Asserts that y is the oracle's, rounded once."""
    y0, x, pool = (widen(array, dtype) for array in inputs[:3])
    oracle = reference("multi_lora_delta").multi_lora_delta
    magnitude = oracle(*map(np.abs, (y0, x, pool)), inputs[3], np.abs(inputs[4]), inputs[5])
    assert_rounded_once(y, oracle(y0, x, pool, *inputs[3:]), magnitude, dtype)


def read_of_pool(inputs):
    """The bytes of the true ranks of the adapters that the indices name."""
    used = {i for i in inputs[5].tolist() if i >= 0}
    return sum(int(inputs[3][i]) for i in used) * inputs[2].shape[2] * inputs[2].itemsize


@pytest.mark.parametrize("dtype, rank", each_rank(DTYPES))
def test_every_rank(run, reference, dtype, rank):
    for k, n, max_rank in ((100, 31, rank), (257, 130, 256)):
        inputs = case(dtype, [1, 0, 0, 2, 1], (rank, max(1, rank - 1), rank), k, n, max_rank)
        y, report = run(dtype, inputs, 40)
        assert_near(reference, dtype, y, inputs)
        assert report["gm"]["pool"]["read"] == read_of_pool(inputs)


@pytest.mark.parametrize("dtype, kind", [*itertools.product(("float32", "float16"), KINDS), ("bfloat16", "skewed")])
def test_every_popularity(run, reference, dtype, kind):
    for tokens in (1, 3, 8, 31, 75):
        inputs = case(dtype, popularity(kind, tokens), scales=[-1, 0.5, 2, 0, 1, 1, -0.25])
        y, _ = run(dtype, inputs)
        assert_near(reference, dtype, y, inputs)


@pytest.mark.parametrize("cores", (1, 2, 7, 40, 48))
def test_any_number_of_cores(run, reference, cores):
    for tokens, kind in ((1, "identical"), (9, "skewed"), (40, "distinct")):
        inputs = case("float16", popularity(kind, tokens), k=16 * 48 + 5, n=16 * max(cores, 40))
        y, _ = run("float16", inputs, cores)
        assert_near(reference, "float16", y, inputs)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("k, n", [(1, 1), (1, 300), (300, 1), (16, 16), (2100, 17), (17, 2100)])
def test_any_width(run, reference, dtype, k, n):
    """With two cores B's tiles are wider than 64 columns for each of their rows, and expand counts its lanes."""
    inputs = case(dtype, [2, 4, -1, 2, 3], k=k, n=n)
    for cores in (2, 48):
        y, _ = run(dtype, inputs, cores)
        assert_near(reference, dtype, y, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, rank, reads", [(33, 64, 2), (100, 64, 4), (17, 256, 2)])
def test_more_rows_than_share_a_read(run, reference, dtype, tokens, rank, reads):
    """The other rows of the adapter are in another segment, which reads it again: 32 share it, 16 at rank 256."""
    inputs = case(dtype, np.zeros(tokens, int), (rank,), k=19, n=24)
    y, report = run(dtype, inputs, 12)
    assert_near(reference, dtype, y, inputs)
    assert report["gm"]["pool"]["read"] == reads * read_of_pool(inputs)


def test_more_tokens_than_a_round_has(run, reference):
    inputs = case("float32", popularity("zipf", 1030), k=19, n=23)
    y, _ = run("float32", inputs, 12)
    assert_near(reference, "float32", y, inputs)


def test_as_many_slots_as_the_table_has_room_for(run, reference):
    inputs = case("float32", np.arange(600) % 97 * 89, [1] * 8638, 3, 4)
    y, report = run("float32", inputs, 4)
    assert_near(reference, "float32", y, inputs)
    assert report["peak"]["UB"] == 196352
    with pytest.raises(kernels.model.KernelRefused, match="InitBuffer"):
        run("float32", case("float32", [0] * 600, [1] * 8639, 3, 4), 4)


def test_batches_of_one_size_and_other_segments(run, reference):
    for indices in ([0] * 8, [0] * 7 + [1], [1, 0] * 4, [0, 0, 1, 1, 1, 2, 3, 4], range(8)):
        inputs = case("float16", [i % 7 for i in indices])
        assert_near(reference, "float16", run("float16", inputs)[0], inputs)


def test_no_tokens(run):
    for cores in (2, 48):
        y, report = run("float16", case("float16", []), cores)
        assert y.size == 0 and moved(report) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_an_adapter_stay_bit_for_bit(run, dtype):
    inputs = case(dtype, popularity("skipped", 31))
    bits = STORED[dtype]().itemsize * 8
    everything = np.random.default_rng(1).integers(0, 2**bits, inputs[0].shape, f"uint{bits}").view(STORED[dtype])
    skipped = (inputs[5] < 0) | (inputs[5] == 5)  # no index, and the slot whose rank is 0
    inputs[0][skipped] = everything[skipped]
    y, _ = run(dtype, inputs)
    assert y[skipped].tobytes() == inputs[0][skipped].tobytes()
    # All other adapters have a nonzero scale, so they must change their rows.
    assert (y != inputs[0])[~skipped].any(axis=1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_and_ranks_that_do_not_exist_give_nan(run, reference, dtype):
    """A slot beyond the pool and a rank beyond max_rank give rows of NaN, and other rows are unaffected."""
    inputs = case(dtype, [0, 7, 1, 2**31 - 1, -1, 3, 2, -(2**31)])
    inputs[2] = normal(9, dtype, inputs[2].shape)  # none of whose numbers is a NaN
    inputs[3][3] = 65
    inputs[3][2] = -5
    y, _ = run(dtype, inputs)
    lost = np.isnan(widen(y, dtype)).all(axis=1)
    assert lost.tolist() == [False, True, False, True, False, True, True, False]
    inputs[5][lost] = -1
    assert_near(
        reference, dtype, y[~lost], [array[~lost] if i in (0, 1, 5) else array for i, array in enumerate(inputs)]
    )


def test_each_row_depends_on_its_own_adapter_alone(run):
    inputs = case("float16", popularity("distinct", 14))
    before, _ = run("float16", inputs)
    inputs[2][4, :64] *= 2
    after, _ = run("float16", inputs)
    assert ((before != after).any(axis=1) == (inputs[5] == 4)).all()


@pytest.mark.parametrize("scale", (0.0, -1.0))
def test_scale(run, scale):
    plus = case("float32", [4, 3], scales=np.ones(7))
    other = case("float32", [4, 3], scales=np.full(7, scale))
    delta, scaled = (run("float32", inputs)[0] - inputs[0] for inputs in (plus, other))
    np.testing.assert_allclose(scaled, scale * delta, atol=1e-4)
    assert np.abs(delta).min(axis=1).all()


def test_same_bits_every_time(run):
    inputs = case("float32", popularity("zipf", 40), k=400, n=300)
    first, second = (run("float32", inputs)[0] for _ in range(2))
    assert np.array_equal(first, second)


def ones(tokens, adapters, rank, size):
    """Inputs of full size, for tests that only count bytes."""
    rows, pool = np.ones((tokens, size), np.float16), np.ones((adapters, rank, 2 * size), np.float16)
    indices = np.arange(tokens, dtype=np.int32) % adapters
    return [rows, rows, pool, np.full(adapters, rank, np.int32), np.ones(adapters, np.float32), indices]


@pytest.mark.parametrize(
    "tokens, adapters, rank, size, most",
    [
        (1, 1, 8, 4096, 1.04),
        (1, 1, 64, 5120, 1.04),
        (8, 1, 8, 5120, 1.15),
        (8, 1, 64, 4096, 1.15),
        (8, 4, 16, 4096, 1.03),
        (8, 4, 16, 5120, 1.03),
        (32, 1, 8, 4096, 1.15),
        (32, 1, 64, 5120, 1.15),
        (32, 4, 16, 4096, 1.15),
        (32, 32, 16, 5120, 1.01),
    ],
)
def test_time_at_best(run, tokens, adapters, rank, size, most):
    """Relative to all cores sharing bytes and arithmetic, however many rows share an adapter. All is read once."""
    inputs = ones(tokens, adapters, rank, size)
    _, report = run("float16", inputs)
    assert report["gm"]["pool"]["read"] == read_of_pool(inputs)
    assert report["gm"]["x"]["read"] == inputs[1].nbytes
    assert report["gm"]["y0"]["read"] == report["gm"]["y"]["written"] == inputs[0].nbytes
    least = read_of_pool(inputs) + inputs[1].nbytes + 2 * inputs[0].nbytes + inputs[5].nbytes
    assert over_the_bound(report, least) <= most


@pytest.mark.parametrize("cores", (40, 48))
@pytest.mark.parametrize("tokens, adapters", [(1, 1), (4, 4), (32, 32)])
def test_all_cores_have_their_share(run, cores, tokens, adapters):
    _, report = run("float16", ones(tokens, adapters, 16, 4096), cores)
    read = [core["gm"].get("pool", {"read": 0})["read"] for core in report["cores"]]
    assert len(read) == cores and min(read) > 0 and max(read) <= 1.25 * np.mean(read)
