"""lora_linear: what is tested of it."""

import numpy as np

from mindlora.ops import LoraLinear, LoraLinearWithBias, lora_linear
from tests.ops.contract import SCALE, Operator, normals, without_last


def inputs(dtype, tokens, k, n, rank):
    floats = normals(dtype, x=(tokens, k), W=(n, k), A=(rank, k), B=(n, rank))
    return {**floats, "scale": SCALE, **normals(dtype, bias=(n,))}


def gradients(reference, dy, x, w, a, b, scale, bias=None):
    found = dict(zip(("x", "A", "B", "bias"), reference.lora_linear_grad(dy, x, w, a, b, scale)))
    return {**found, "scale": np.sum((dy.astype(np.float64) @ b) * (x.astype(np.float64) @ a.T))}


WITH_BIAS = Operator(
    name="lora_linear_with_bias",
    op="lora_linear",
    inputs=inputs,
    terms=lambda tokens, k, n, rank: 1 + k + rank * k**0.5,
    function="LoraLinear",
    # Up to 4 tokens take one kernel, more take another, in panels of 8 or 16 and passes of 64. Several threads share
    # the rows of the last ones.
    sizes=(
        *((0, 37, 53, 8), (1, 1, 1, 1), (1, 37, 53, 256), (3, 37, 53, 13), (4, 70, 129, 16), (5, 70, 129, 1)),
        *((8, 37, 53, 64), (31, 70, 129, 128), (130, 37, 53, 256)),
        *((1, 300, 260, 15), (2, 256, 256, 15), (4, 1000, 67, 15), (5, 64, 1025, 15), (9, 300, 260, 15)),
    ),
    threaded=(3, 256, 260, 5),
    cell=LoraLinearWithBias,
    call=lora_linear,
    cell_sizes=((31, 37, 53, 13), (1, 37, 53, 1), (3, 1, 1, 8), (130, 37, 53, 256), (0, 37, 53, 64)),
    gradients=gradients,
    gradient_sizes=((3, 4, 5, 2), (1, 7, 9, 1), (31, 7, 9, 13)),
    gradient_terms=160,
    rounds_between=("x",),
    refused_size=(5, 7, 9, 3),
    alike=(("x", "W", "A", "B", "bias"),),
    unchecked=("scale",),
    refused_shapes=(
        ({"W": (9, 8)}, "K is 7 in one input and 8 in another."),
        ({"A": (257, 7)}, "the rank is 257 in one input and 3 in another."),
        ({"B": (8, 3)}, "N is 9 in one input and 8 in another."),
        ({"B": (9, 4)}, "the rank is 3 in one input and 4 in another."),
        ({"x": (7,)}, "x has 1 dimensions: it must have 2."),
        ({"bias": (8,)}, "N is 9 in one input and 8 in another."),
    ),
    refused_by_kernel=(("bias", "bfloat16", "bias is bfloat16: it must be float32."),),
)
PLAIN = without_last(
    WITH_BIAS,
    name="lora_linear",
    cell=LoraLinear,
    # Of each of the two kernels, and a layer without outputs.
    sizes=((1, 37, 53, 8), (4, 70, 129, 16), (1, 8, 0, 4), (5, 8, 0, 4), (31, 70, 129, 13), (9, 300, 260, 15)),
)
FORMS = (PLAIN, WITH_BIAS)
