"""An update folded into a weight: rounded sums, row gains, blocks, and both probes against their bounds."""

import numpy as np
import pytest

from mindlora.core.numerics import folding
from mindlora.core.numerics.dtypes import BFLOAT16, to_float32
from mindlora.core.numerics.folding import fold_and_probe, fold_weight, probe_weight, row_gains, worst_of

DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": BFLOAT16}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3])
def test_rounding_is_within_the_bound(dtype, size):
    rng = np.random.default_rng(0)
    weight, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 2000), (8, 2000), (64, 8)))
    rows, difference, bound = fold_and_probe(weight * np.float32(size), b, a * np.float32(size), DTYPES[dtype])
    assert rows.dtype == DTYPES[dtype] and (difference <= bound).all()
    # Rounding errors are random, so their sum is far below the bound; in float32 they barely show.
    assert (difference < bound / 3).all()
    # And no looser than half a step of each element, with a millionth for float32's sums.
    half_a_step = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[dtype]
    size_of_rows = np.linalg.norm(to_float32(rows), axis=1) + np.abs(b) @ np.linalg.norm(a * np.float32(size), axis=1)
    assert (bound <= (half_a_step + 3e-6) * np.sqrt(2000) * size_of_rows + 2000 * 2.0**-25).all()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_network_s_weight_and_a_file_s_rows_are_folded_to_the_same_bytes(monkeypatch, dtype, dora):
    weight, b, a = normal(9, 20).astype(dtype), normal(9, 3, seed=1), normal(3, 20, seed=2)
    magnitude = np.abs(normal(9, seed=3)) if dora else None
    # Four rows to a block, and the last one smaller. In blocks of other heights, a BLAS may sum in another order.
    monkeypatch.setattr(folding, "_BLOCK_ELEMENTS", 80)
    merged, gains = fold_weight(weight, b, a, 1.5, magnitude)
    assert merged.dtype == weight.dtype
    for begin in range(0, 9, 4):
        part = slice(begin, begin + 4)
        sizes = None if magnitude is None else magnitude[part]
        rows, *_ = fold_and_probe(weight[part].astype(np.float32), np.float32(1.5) * b[part], a, weight.dtype, sizes)
        assert merged[part].tobytes() == rows.tobytes()
    sums = weight.astype(np.float64) + 1.5 * b.astype(np.float64) @ a
    expected = magnitude / np.linalg.norm(sums, axis=1) if dora else np.ones(9)
    np.testing.assert_allclose(gains[:, 0], expected, rtol=1e-5)
    difference, bound = probe_weight(weight, merged, b, a, 1.5, gains)
    assert difference.shape == (4, 9) and (difference <= bound).all()


def test_row_gains_bring_rows_to_their_magnitudes():
    weight, magnitude = normal(5, 7), np.abs(normal(5, seed=1))
    np.testing.assert_allclose(np.linalg.norm(weight * row_gains(weight, magnitude), axis=1), magnitude, rtol=1e-6)
    weight[2] = 0
    assert not np.isfinite(row_gains(weight, magnitude)[2]).any()


def test_the_probe_of_a_weight_sees_an_update_that_is_lost_in_rounding():
    weight, b, a = normal(5, 600), 1e-6 * normal(5, 2, seed=1), normal(2, 600, seed=2)
    merged, gains = fold_weight(weight, b, a, 1.0)
    assert worst_of(*probe_weight(weight, merged, b, a, 1.0, gains))[1]
    assert not worst_of(*probe_weight(weight, weight, b, a, 1.0, gains))[1]


@pytest.mark.parametrize(
    "difference, bound, index",
    [
        ([1.0, 3.0, 2.0], [4.0, 4.0, 4.0], None),
        ([1.0, 3.0, 2.0], [4.0, 4.0, 1.0], 2),
        ([1.0, np.nan, 2.0], [4.0, 4.0, 4.0], 1),
        ([1.0, 2.0, np.inf], [4.0, 4.0, np.inf], 2),
    ],
)
def test_the_worst_difference_is_one_that_rounding_does_not_explain(difference, bound, index):
    found, explained = worst_of(np.array(difference), np.array(bound))
    assert explained == (index is None) and found == ((1,) if index is None else (index,))
