"""multi_lora_delta: what is tested of it."""

import numpy as np

from mindlora.ops import MultiLoraDelta, multi_lora_delta
from tests.ops.contract import Operator, named
from tests.support.native import normal
from tests.support.pooled_adapters import KINDS, MAX_RANK, SLOTS, TRUE_RANKS, pooled, popularity

K, N = 37, 53
POOL = ("pool", "ranks", "scales")


def adapters(k, n, rank=0, dtype="float32"):
    """Returns a pool's three arrays by name: of SLOTS adapters of mixed ranks, or of three, the first of a rank."""
    ranks = np.int32([rank, 0, max(1, rank - 1)]) if rank else TRUE_RANKS
    return dict(zip(POOL, pooled(k + n, ranks, rank or MAX_RANK, dtype)))


def inputs(dtype, tokens, kind, k=K, n=N, rank=0):
    arrays = {
        "y0": normal(tokens, n, seed=1, dtype=dtype),
        "x": normal(tokens, k, seed=2, dtype=dtype),
        **adapters(k, n, rank, dtype),
        "indices": popularity(kind, tokens, 3 if rank else SLOTS),
    }
    return named(arrays, [dtype] * 3 + ["int32", "float32", "int32"])


def gradients(reference, dy, y0, *arrays):
    return dict(zip(("y0", "x", "pool", "scales"), reference.multi_lora_delta_grad(dy, *arrays)))


# Each rank that ends otherwise, and K and N at the ends of vectors.
RANKS = (
    *((9, "distinct", 1, 1, 1), (9, "distinct", 15, 17, 7), (9, "distinct", 64, 130, 8), (9, "distinct", 15, 17, 9)),
    *((9, "distinct", 64, 130, 16), (9, "distinct", 1, 1, 128), (9, "distinct", 64, 130, 256)),
)
CELL_SIZES = (*((31, kind) for kind in ("distinct", "skewed", "skipped", "none")), (1, "skipped"), (3, "skipped"))
MULTI_LORA_DELTA = Operator(
    name="multi_lora_delta",
    op="multi_lora_delta",
    inputs=inputs,
    expected=lambda reference, *arrays: reference.multi_lora_delta(*arrays),
    terms=lambda tokens, kind, k=K, n=N, rank=MAX_RANK: 1 + rank * k**0.5,
    function="MultiLoraDelta",
    sizes=(
        *((31, kind) for kind in KINDS),
        *((0, "uniform"), (1, "uniform"), (3, "zipf"), (8, "skipped"), (512, "skewed"), *RANKS),
    ),
    threaded=(9, "uniform"),
    cell=MultiLoraDelta,
    call=multi_lora_delta,
    cell_sizes=CELL_SIZES,
    gradients=gradients,
    gradient_sizes=((5, "skipped", 4, 3, 2), (11, "skipped")),
    gradient_terms=2800,
    refused_size=(4, "distinct"),
    refused_shapes=(
        ({"x": (5, K)}, "the number of tokens is 4 in one input and 5 in another."),
        ({"pool": (SLOTS, MAX_RANK, K + N - 1)}, "K + N is 90 in one input and 89 in another."),
        ({"pool": (SLOTS, 257, K + N)}, "rank is 257: it must be 1 to 256."),
        ({"pool": (MAX_RANK, K + N)}, "pool has 2 dimensions: it must have 3."),
        ({"scales": (SLOTS - 1,)}, "the number of slots is 7 in one input and 6 in another."),
    ),
    refused_values=(
        ("indices", 2, SLOTS, "row 2 asks for slot 7 of 7."),
        ("ranks", 2, MAX_RANK + 1, "rank 65 of slot 2 is not 0 to 64."),
    ),
    refused_dtypes=(
        ("x", "float16", "x is Float16 and y0 is Float32: cast them to one dtype."),
        ("pool", "int32", "pool is Int32: it must be Float32, Float16 or BFloat16."),
        ("ranks", "int64", "ranks is Int64: it must be Int32."),
        ("scales", "float16", "scales is Float16: it must be Float32."),
        ("indices", "int64", "indices is Int64: it must be Int32."),
    ),
)
FORMS = (MULTI_LORA_DELTA,)
