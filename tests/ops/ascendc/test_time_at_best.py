"""The larger of bytes over bandwidth and repeats over clock, of the Ascend C kernels in the simulator."""

import numpy as np
import pytest

BYTES_PER_REPEAT = 889  # 1.6 TB/s over 1.8 GHz, as the plans have it
VECTOR_CORES = 48
D = 4096


def over_bound(report, least):
    """Time at best over the bound of all cores sharing bytes and repeats."""
    bytes_moved = sum(
        traffic["read"] + traffic["written"] for name, traffic in report["gm"].items() if name != "tiling"
    )
    repeats = [core["repeats"] for core in report["cores"]]
    on_vector_cores = sum(core["repeats"] for core in report["cores"] if core["name"].startswith("AIV"))
    time = max(bytes_moved, max(repeats) * BYTES_PER_REPEAT)
    return time / max(least, on_vector_cores / VECTOR_CORES * BYTES_PER_REPEAT)


def ones(dtype, *shape):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    "dtype, tokens, rank",
    [("float16", 1, 64), ("float16", 8, 16), ("float16", 8, 64), ("float16", 16, 64), ("float32", 8, 64)],
)
def test_lora_delta(kernels, dtype, tokens, rank):
    y0, x, a, b = (ones(dtype, *shape) for shape in ((tokens, D), (tokens, D), (rank, D), (D, rank)))
    report = kernels.run(
        "lora_delta",
        dtype,
        [("y0", y0), ("x", x), ("a", a), ("b", b), ("scale", ones("float32", 1))],
        [("y", np.empty_like(y0), "out")],
        (tokens, D, D, rank),
    )
    assert over_bound(report, 2 * y0.nbytes + x.nbytes + a.nbytes + b.nbytes) <= 1.15


@pytest.mark.parametrize(
    "dtype, tokens, rank",
    [("float16", 8, 16), ("float16", 8, 64), ("float16", 64, 64), ("float32", 8, 64), ("float32", 16, 16)],
)
def test_multi_lora_delta_with_one_adapter(kernels, dtype, tokens, rank):
    y0, x, pool = ones(dtype, tokens, D), ones(dtype, tokens, D), ones(dtype, 1, rank, 2 * D)
    report = kernels.run(
        "multi_lora_delta",
        dtype,
        [("y0", y0), ("x", x), ("pool", pool), ("ranks", np.full(1, rank, np.int32)), ("scales", ones("float32", 1))]
        + [("indices", np.zeros(tokens, np.int32))],
        [("y", np.empty_like(y0), "out")],
        (tokens, 1, rank, D, D),
    )
    assert over_bound(report, 2 * y0.nbytes + x.nbytes + pool.nbytes) <= 1.15
