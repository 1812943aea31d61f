"""multi_lora_delta: what is tested of it."""

import numpy as np

from mindlora.ops import MultiLoraDelta, multi_lora_delta
from tests.ops.contract import Operator, named, normals
from tests.support.pooled_adapters import KINDS, MAX_RANK, SLOTS, TRUE_RANKS, pooled, popularity

K, N = 37, 53


def adapters(k, n, rank=0, dtype="float32"):
    """Returns a pool, its ranks and scales by name: SLOTS adapters of mixed ranks, or three, the first of a rank."""
    ranks = np.int32([rank, 0, max(1, rank - 1)]) if rank else TRUE_RANKS
    arrays = pooled(k + n, ranks, rank or MAX_RANK, dtype)
    return named(("pool", "ranks", "scales"), arrays, (dtype, "int32", "float32"))


def indices(tokens, kind, rank=0):
    """Returns the slot of each token by name."""
    return {"indices": (popularity(kind, tokens, 3 if rank else SLOTS), "int32")}


def inputs(dtype, tokens, kind, k=K, n=N, rank=0):
    floats = normals(dtype, y0=(tokens, n), x=(tokens, k))
    return {**floats, **adapters(k, n, rank, dtype), **indices(tokens, kind, rank)}


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
    inputs=inputs,
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
    alike=(("y0", "x"), ("pool",)),
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
)
FORMS = (MULTI_LORA_DELTA,)
