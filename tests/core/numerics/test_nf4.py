"""The 4-bit NormalFloat of QLoRA: its table, its size, its error, and what it refuses."""

from statistics import NormalDist

import numpy as np
import pytest

from mindlora.core.errors import LoraError, QuantizationError
from mindlora.core.numerics import nf4
from mindlora.core.numerics.nf4 import TABLE, Nf4Array, dequantize, quantize
from tests.support.native import normal

# Half of the largest gap between two neighbors in the table, which is the first, from -1 to -0.696.
HALF_GAP = 0.15190360
OPERATOR = "nf4_linear"
SHAPES = [(1, 1), (3, 63), (2, 64), (5, 65), (7, 130), (300, 64), (130, 1000)]


def blocks_of(array, columns):
    """Returns [N, blocks, 64], padded with zeros."""
    padding = -columns % 64
    return np.pad(array, [(0, 0), (0, padding)]).reshape(len(array), -1, 64)


def read_back(array):
    """Returns the absmax of every block as float64, by a loop of its own."""
    rows, blocks = array.absmax.shape
    return np.array(
        [
            [
                float(array.offsets[(n * blocks + b) // 256])
                + float(array.scales[(n * blocks + b) // 256]) * int(array.absmax[n, b])
                for b in range(blocks)
            ]
            for n in range(rows)
        ]
    )


def test_the_table_is_the_published_one():
    assert TABLE.dtype == np.float32 and len(TABLE) == 16 and (np.diff(TABLE) > 0).all()
    np.testing.assert_array_equal(TABLE[[0, 7, 15]], [-1, 0, 1])
    # Dettmers et al., 2023: eight quantiles below zero and nine above, evenly spaced in probability.
    quantile = NormalDist().inv_cdf
    offset = 0.9677083
    low = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    high = [quantile(p) for p in np.linspace(0.5, offset, 9)[1:]]
    np.testing.assert_allclose(TABLE, np.array([*low, 0, *high]) / quantile(offset), atol=1e-6)
    np.testing.assert_allclose(np.diff(TABLE).max() / 2, HALF_GAP, atol=1e-7)


@pytest.mark.parametrize("n, k, size", [(300, 64, 1), (70, 128, 2), (11, 700, 1), (5, 20000, 1), (3, 16384, 256)])
def test_rows_are_taken_out_of_a_weight_without_a_change(n, k, size):
    array = quantize(normal(n, k))
    rows = np.random.default_rng(0).permutation(n)[: n // 2 + 1]
    scales, offsets = (nf4.by_row(values, *array.absmax.shape) for values in (array.scales, array.offsets))
    assert scales.shape == (n, -(-k // 64) // size)
    taken = Nf4Array(
        array.codes[rows], array.absmax[rows], scales[rows].reshape(-1), offsets[rows].reshape(-1), (len(rows), k)
    )
    np.testing.assert_array_equal(dequantize(taken), dequantize(array)[rows])


def test_the_reference_has_the_same_table(reference):
    np.testing.assert_array_equal(np.float32(reference.TABLE), TABLE)


@pytest.mark.parametrize("shape", [(64, 4096), (1024, 64), (16, 11008)])
def test_bits_per_parameter_of_whole_groups(shape):
    array = quantize(normal(*shape))
    assert 8 * array.nbytes <= 4.13 * shape[0] * shape[1]
    parts = (array.codes, array.absmax, array.scales, array.offsets)
    assert array.nbytes == sum(part.nbytes for part in parts)


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_shapes_and_dtypes_of_the_tensors(rows, columns):
    array = quantize(normal(rows, columns))
    blocks, groups = -(-columns // 64), -(-(rows * -(-columns // 64)) // 256)
    assert array.shape == (rows, columns)
    for part, shape, dtype in (
        (array.codes, (rows, blocks * 32), np.uint8),
        (array.absmax, (rows, blocks), np.uint8),
        (array.scales, (groups,), np.float32),
        (array.offsets, (groups,), np.float32),
    ):
        assert part.shape == shape and part.dtype == dtype


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_dequantize_is_the_reference(reference, rows, columns):
    array = quantize(normal(rows, columns))
    want = reference.dequantize(array.codes, array.absmax, array.scales, array.offsets, columns)
    back = dequantize(array)
    assert back.dtype == np.float32 and back.shape == (rows, columns)
    np.testing.assert_allclose(back, want, rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("size", [1e-6, 1, 1e6])
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_every_number_gets_the_nearest_value_and_the_error_is_bounded(rows, columns, size):
    weight = normal(rows, columns) * np.float32(size)
    array = quantize(weight)
    blocked, largest = blocks_of(weight.astype(np.float64), columns), read_back(array)
    error = np.abs(blocked - blocks_of(dequantize(array).astype(np.float64), columns))
    values = largest[:, :, None, None] * TABLE.astype(np.float64)
    nearest = np.abs(blocked[..., None] - values).min(axis=3)
    assert (error <= nearest + 1e-6 * largest[:, :, None]).all()
    # Storing the absmax in 8 bits costs up to half a step, with 255 steps between the group's least and largest.
    exact = np.abs(blocked).max(axis=2)
    step = array.scales.astype(np.float64)[(np.arange(exact.size) // 256).reshape(exact.shape)]
    assert (np.abs(exact - largest) <= 0.5001 * step + 1e-6 * exact).all()
    assert (error <= (HALF_GAP * largest + 0.5001 * step + 1e-6 * exact)[:, :, None]).all()


def test_the_error_of_normal_weights():
    weight = normal(256, 1024)
    error = dequantize(quantize(weight)) - weight
    assert 0.088 < np.sqrt(np.mean(error**2)) < 0.096  # ops/nf4_linear/README.md: 9.2 %


def test_an_outlier_affects_only_its_block():
    weight = normal(8, 640)
    weight[3, 70] = 100
    error = np.delete((dequantize(quantize(weight)) - weight).reshape(8, 10, 64), 3, axis=0)
    # The absmax's step in its group grows from 0.01 to 0.4, and so the error from 9.2 % to this.
    assert np.sqrt(np.mean(error**2)) < 0.11


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_zeros_stay_zeros_among_others(rows, columns):
    weight = normal(rows, columns)
    weight[::2] = 0
    weight[-1, : columns // 2] = 0
    array = quantize(weight)
    assert not dequantize(array)[weight == 0].any()
    codes = np.concatenate([array.codes[0] & 15, array.codes[0] >> 4])
    assert (codes == 7).all()


@pytest.mark.parametrize("constant", [0.0, 1.5, -2.0, 1e-30, -3e38])
def test_constant_blocks_are_exact(constant):
    weight = np.full((3, 200), constant, np.float32)
    np.testing.assert_array_equal(dequantize(quantize(weight)), weight)


def test_the_values_of_the_table_come_back_exactly():
    weight = np.tile(TABLE, (4, 8)) * np.float32(0.25)
    np.testing.assert_array_equal(dequantize(quantize(weight)), weight)


def test_padding_is_zero():
    array = quantize(np.full((2, 70), 3.0, np.float32))
    second = array.codes.reshape(2, 2, 32)[:, 1]
    assert (second[:, :6] == 7 << 4 | 15).all() and (second[:, 6:] == 7 << 4 | 7).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes_are_quantized_as_in_float32(dtype):
    weight = normal(5, 130).astype(dtype)
    np.testing.assert_array_equal(quantize(weight).codes, quantize(weight.astype(np.float32)).codes)


def test_the_number_quantized_at_a_time_changes_nothing(monkeypatch):
    weight = normal(77, 100)
    whole = quantize(weight)
    for count in (1, 1000):
        monkeypatch.setattr(nf4, "_AT_ONCE", count)
        parts = quantize(weight)
        for name in ("codes", "absmax", "scales", "offsets"):
            np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_a_view_and_its_copy_are_the_same():
    weight = normal(130, 70)
    np.testing.assert_array_equal(quantize(weight.T).codes, quantize(weight.T.copy()).codes)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [(0, 0), (4, 99)])
def test_infinity_and_nan_are_refused_by_name(bad, at):
    weight = normal(5, 100)
    weight[at] = bad
    with pytest.raises(QuantizationError) as error:
        quantize(weight, "layers.0.wq.weight")
    assert str(error.value).startswith(
        f"layers.0.wq.weight holds infinity, NaN or numbers that float32 cannot hold, the first in row {at[0]}"
    ) and isinstance(error.value, LoraError)


def test_numbers_that_float32_cannot_hold_are_refused():
    with pytest.raises(QuantizationError, match="weight holds infinity, NaN or numbers that float32 cannot hold"):
        quantize(np.full((2, 3), 1e39))


@pytest.mark.parametrize(
    "weight, what",
    [
        (np.zeros(4, np.float32), r"float32\[4\]"),
        (np.zeros((2, 0), np.float32), r"float32\[2, 0\]"),
        (np.zeros((2, 3), np.int32), r"int32\[2, 3\]"),
        (np.zeros((2, 3, 4), np.float32), r"float32\[2, 3, 4\]"),
    ],
)
def test_only_matrices_of_floating_point_numbers_are_quantized(weight, what):
    with pytest.raises(QuantizationError, match=f"w is {what}: it must be a matrix of float16, float32 or float64"):
        quantize(weight, "w")
