"""nf4_dequantize on the vector cores in the simulator (not CANN and not an NPU)."""

import numpy as np
import pytest

from mindlora.core.numerics.nf4 import Nf4Array, dequantize, layout, quantize
from tests.support.ascend_arrays import DTYPES, STORED, empty, moved, store, widen
from tests.support.ascendc_model import kernels


@pytest.fixture(scope="module")
def run():
    """Decodes the four tensors of a weight into W [rows, columns]; returns it and the report."""

    def run_kernel(dtype, parts, columns, cores=48):
        w = empty(dtype, len(parts[0]), columns)
        # Only its shape matters: no byte of it may be read.
        like = np.zeros((1, columns), STORED[dtype])
        inputs = [("like", like), *zip(("codes", "absmax", "scales", "offsets"), parts)]
        report = kernels.run("nf4_dequantize", dtype, inputs, [("w", w, "out")], w.shape, cores // 2, cores)
        assert report["unwritten"]["w"] == 0 and "like" not in report["gm"]
        return w, report

    return run_kernel


def random_parts(rows, columns, seed=0):
    """All bytes and all codes of absmax, with a different scale and offset for each group."""
    generator = np.random.default_rng([seed, rows, columns])
    parts = [
        generator.integers(0, 256, shape, np.uint8)
        if dtype == np.uint8
        else generator.uniform(0.001, 1, shape).astype(np.float32)
        for shape, dtype in layout(rows, columns).values()
    ]
    return parts


def assert_same_bits(got, want, dtype):
    np.testing.assert_array_equal(got.view(np.uint8), store(want, dtype).view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns",
    [
        (1, 1),
        (1, 64),
        (1, 65),
        (7, 63),
        (31, 100),
        (130, 257),
        (5, 8192),
        (300, 64),
        (257, 1),
        (3, 20000),
        (520, 70),
        (64, 4096),
    ],
)
def test_every_bit_is_the_oracles(run, reference, dtype, rows, columns):
    parts = random_parts(rows, columns)
    want = dequantize(Nf4Array(*parts, (rows, columns)))
    if want.size < 100000:
        np.testing.assert_array_equal(want, reference("nf4_dequantize").nf4_dequantize(*parts, columns))
    assert_same_bits(run(dtype, parts, columns)[0], want, dtype)


@pytest.mark.parametrize("dtype, cores", [*(("float16", cores) for cores in (1, 2, 40, 48)), ("float32", 7)])
@pytest.mark.parametrize("rows, columns", [(33, 1000), (40, 1024), (2, 64)])
def test_any_number_of_cores_writes_the_same_bits_twice(run, dtype, cores, rows, columns):
    parts = random_parts(rows, columns)
    want = dequantize(Nf4Array(*parts, (rows, columns)))
    for _ in range(2):
        w, report = run(dtype, parts, columns, cores)
        assert_same_bits(w, want, dtype)
    # Fewer than 32 blocks are not worth another core.
    assert report["cores_that_worked"] == min(cores, -(-parts[1].size // 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_as_quantize_makes_it(run, dtype):
    weight = np.random.default_rng(3).normal(size=(70, 200)).astype(np.float32)
    weight[5] = 0
    array = quantize(weight)
    w, _ = run(dtype, [array.codes, array.absmax, array.scales, array.offsets], 200)
    assert_same_bits(w, dequantize(array), dtype)
    assert not w[5].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_at_the_ends_of_the_dtypes(run, dtype):
    """Scales that overflow float16, that make results subnormal, and that are NaN."""
    parts = random_parts(6, 64 * 256)
    parts[2][:] = [1e5, 1e-9, 0, 1e36, np.nan, 1e-40]
    parts[3][:] = [0, 0, -2, 1, 1, 0]
    want = dequantize(Nf4Array(*parts, (6, 64 * 256)))
    w, _ = run(dtype, parts, 64 * 256)
    there = [0, 1, 2, 3, 5]
    with np.errstate(over="ignore"):
        assert_same_bits(w[there], want[there], dtype)
    assert np.isfinite(want[there]).all() and np.isnan(widen(w[4], dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns", [(256, 2048), (100, 5000)])
def test_each_byte_is_moved_once_and_the_cores_have_equal_loads(run, dtype, rows, columns):
    parts = random_parts(rows, columns)
    w, report = run(dtype, parts, columns)
    assert report["gm"]["codes"]["read"] == parts[0].nbytes and report["gm"]["absmax"]["read"] == parts[1].nbytes
    assert report["gm"]["w"] == {"read": 0, "written": w.nbytes}
    # In addition, the kernel reads a scale and an offset for each tile.
    assert moved(report) <= 1.002 * (sum(part.nbytes for part in parts) + w.nbytes)
    written = [core["gm"]["w"]["written"] for core in report["cores"]]
    assert len(written) == 48 and max(written) <= 1.05 * np.mean(written) + 2048 * w.itemsize
    assert report["peak"]["UB"] <= 196352


def test_a_large_weight_is_counted_in_64_bits():
    plan, tiling = kernels.plan("nf4_dequantize", "bfloat16", (1 << 18, 1 << 14))
    assert plan.blocks == 48 and int.from_bytes(tiling[:8], "little") == 1 << 32
