"""multi_lora_linear: what is tested of it."""

from mindlora.ops import MultiLoraLinear, MultiLoraLinearWithBias
from tests.ops.contract import Operator, normals, without_last
from tests.ops.operators.multi_lora_delta import CELL_SIZES, RANKS, K, N, adapters, indices
from tests.support.pooled_adapters import KINDS, MAX_RANK, SLOTS


def inputs(dtype, tokens, kind, k=K, n=N, rank=0):
    floats, bias = normals(dtype, x=(tokens, k), W=(n, k)), normals(dtype, bias=(n,))
    return {**floats, **adapters(k, n, rank, dtype), **indices(tokens, kind, rank), **bias}


WITH_BIAS = Operator(
    name="multi_lora_linear_with_bias",
    op="multi_lora_linear",
    inputs=inputs,
    terms=lambda tokens, kind, k=K, n=N, rank=MAX_RANK: 1 + k + rank * k**0.5,
    function="MultiLoraLinear",
    sizes=(
        *((31, kind) for kind in KINDS),
        *((0, "uniform"), (1, "uniform"), (3, "zipf"), (8, "skipped"), (13, "uniform"), (200, "skewed"), *RANKS),
        *((9, "distinct", 70, 1025, 13), (13, "uniform", 1061, 530)),
    ),
    threaded=(23, "skipped", 1061, 530),
    rows=("x", "indices"),
    cell=MultiLoraLinearWithBias,
    cell_sizes=CELL_SIZES,
    refused_size=(4, "distinct"),
    alike=(("x", "bias"), ("W",), ("pool",)),
    refused_shapes=(
        ({"x": (4, K + 1)}, "K is 38 in one input and 37 in another."),
        ({"W": (N, K, 1)}, "W has 3 dimensions: it must have 2."),
        ({"pool": (SLOTS, MAX_RANK, K + N - 1)}, "K + N is 90 in one input and 89 in another."),
        ({"pool": (SLOTS, 257, K + N)}, "rank is 257: it must be 1 to 256."),
        ({"pool": (MAX_RANK, K + N)}, "pool has 2 dimensions: it must have 3."),
        ({"ranks": (SLOTS - 1,)}, "the number of slots is 7 in one input and 6 in another."),
        ({"scales": (SLOTS - 1,)}, "the number of slots is 7 in one input and 6 in another."),
        ({"bias": (N + 1,)}, "N is 53 in one input and 54 in another."),
        ({"bias": (N, 1)}, "bias has 2 dimensions: it must have 1."),
    ),
    refused_values=(
        ("indices", 2, SLOTS, "row 2 asks for slot 7 of 7."),
        ("ranks", 2, MAX_RANK + 1, "rank 65 of slot 2 is not 0 to 64."),
        ("ranks", 2, -1, "rank -1 of slot 2 is not 0 to 64."),
    ),
)
PLAIN = without_last(
    WITH_BIAS,
    name="multi_lora_linear",
    cell=MultiLoraLinear,
    # One token, several, and a layer without outputs.
    sizes=((1, "uniform"), (13, "uniform"), (31, "skipped"), (3, "zipf", K, 0)),
)
FORMS = (PLAIN, WITH_BIAS)
