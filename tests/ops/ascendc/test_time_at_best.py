"""The larger of bytes over bandwidth and repeats over clock, of the plans for a chip of 24 cube and 48 vector cores."""

import numpy as np
import pytest

from tests.support.ascend_arrays import over_the_bound
from tests.support.ascendc_model import kernels

D = 4096


def ones(dtype, *shape):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    "dtype, tokens, rank",
    [("float16", 1, 64), ("float16", 4, 64), ("float16", 8, 8), ("float16", 8, 16), ("float16", 8, 64)]
    + [("float16", 16, 64), ("float32", 8, 64)],
)
def test_lora_delta(dtype, tokens, rank):
    y0, x, a, b = (ones(dtype, *shape) for shape in ((tokens, D), (tokens, D), (rank, D), (D, rank)))
    report = kernels.run(
        "lora_delta",
        dtype,
        [("y0", y0), ("x", x), ("a", a), ("b", b), ("scale", ones("float32", 1))],
        [("y", np.empty_like(y0), "out")],
        (tokens, D, D, rank),
    )
    assert over_the_bound(report, 2 * y0.nbytes + x.nbytes + a.nbytes + b.nbytes) <= 1.15
    assert report["cores_that_worked"] >= 24


@pytest.mark.parametrize(
    "dtype, tokens, rank",
    [("float16", 8, 8), ("float16", 8, 16), ("float16", 8, 64), ("float16", 64, 64), ("float32", 8, 64)]
    + [("float32", 16, 16)],
)
def test_multi_lora_delta_with_one_adapter(dtype, tokens, rank):
    y0, x, pool = ones(dtype, tokens, D), ones(dtype, tokens, D), ones(dtype, 1, rank, 2 * D)
    report = kernels.run(
        "multi_lora_delta",
        dtype,
        [("y0", y0), ("x", x), ("pool", pool), ("ranks", np.full(1, rank, np.int32)), ("scales", ones("float32", 1))]
        + [("indices", np.zeros(tokens, np.int32))],
        [("y", np.empty_like(y0), "out")],
        (tokens, 1, rank, D, D),
    )
    # With 64 tokens of rank 64, cores exchange as much as if each drew little more than its share (kDrawTenths).
    assert over_the_bound(report, 2 * y0.nbytes + x.nbytes + pool.nbytes) <= (1.17 if tokens == 64 else 1.15)
    assert report["cores_that_worked"] >= 24
