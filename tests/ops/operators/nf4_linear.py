"""nf4_linear and the kernels of its gradient: what is tested of them."""

import numpy as np
from mindspore import nn

from mindlora.ops import Nf4Linear, Nf4LinearWithBias, nf4_linear, quantize
from tests.ops.contract import Operator, named, normals, without_last
from tests.support.native import normal

WEIGHT = ("codes", "absmax", "scales", "offsets")
WEIGHT_DTYPES = ("uint8", "uint8", "float32", "float32")


def weight(n, k, seed=1):
    """The four tensors of a quantized [N, K] weight, by name; absmax differs from block to block."""
    array = quantize(normal(n, k, seed=seed) * np.linspace(0.5, 1.5, n * k).reshape(n, k).astype(np.float32))
    return named(WEIGHT, (array.codes, array.absmax, array.scales, array.offsets), WEIGHT_DTYPES)


def inputs(dtype, tokens, k, n):
    return {**normals(dtype, x=(tokens, k)), **weight(n, k), **normals(dtype, bias=(n,))}


def inputs_of_gradient(dtype, tokens, k, n):
    return {**normals(dtype, dy=(tokens, n)), **weight(n, k)}


def inputs_of_gradient_like(dtype, tokens, k, n):
    return {**inputs_of_gradient(dtype, tokens, k, n), "x": (np.zeros((tokens, k), np.float32), dtype)}


def gradients(reference, dy, x, codes, absmax, scales, offsets, bias=None):
    return dict(zip(("x", "bias"), reference.nf4_linear_grad(dy, codes, absmax, scales, offsets, x.shape[1])))


def padded_gradient(reference, dy, codes, absmax, scales, offsets):
    return reference.nf4_linear_grad(dy, codes, absmax, scales, offsets, 64 * absmax.shape[1])[0]


def gradient_like(reference, dy, codes, absmax, scales, offsets, x):
    return reference.nf4_linear_grad(dy, codes, absmax, scales, offsets, x.shape[1])[0]


# Up to 8 tokens take one kernel, more take another, with vectors of 16 and 32 tokens and passes of 512. Several
# threads and tiles share the weights of the last ones.
SIZES = (
    *((0, 37, 53), (1, 1, 1), (2, 37, 53), (3, 64, 64), (4, 70, 129), (5, 200, 9), (6, 37, 53), (7, 70, 129)),
    *((8, 64, 64), (9, 37, 53), (16, 70, 129), (17, 200, 9), (31, 64, 64), (33, 37, 53), (512, 37, 53), (513, 70, 129)),
    *((1, 300, 600), (5, 512, 512), (9, 1000, 267), (2, 64, 2049), (70, 577, 1030)),
)
WITH_BIAS = Operator(
    name="nf4_linear_with_bias",
    op="nf4_linear",
    inputs=inputs,
    terms=lambda tokens, k, n: k + 1,
    function="Nf4Linear",
    sizes=SIZES,
    threaded=(9, 130, 300),
    cell=Nf4LinearWithBias,
    call=nf4_linear,
    cell_sizes=((31, 37, 53), (1, 1, 1), (3, 64, 64), (512, 70, 129), (8, 200, 9), (0, 37, 53)),
    gradients=gradients,
    # Only where K is a multiple of 64 the backward can do without x.
    gradient_sizes=((3, 5, 4), (31, 70, 33), (3, 128, 64)),
    gradient_terms=64,
    refused_size=(5, 7, 9),
    alike=(("x", "bias"),),
    refused_shapes=(
        ({"x": (5, 65)}, "the number of blocks of a row is 2 in one input and 1 in another."),
        ({"x": (7,)}, "x has 1 dimensions: it must have 2."),
        ({"codes": (9, 64)}, "the number of blocks of a row is 2 in one input and 1 in another."),
        ({"codes": (8, 32)}, "N is 8 in one input and 9 in another."),
        ({"scales": (4,)}, "the number of groups is 1 in one input and 4 in another."),
        ({"offsets": (2,)}, "the number of groups is 1 in one input and 2 in another."),
        ({"bias": (8,)}, "N is 9 in one input and 8 in another."),
    ),
    refused_by_kernel=(("codes", "int32", "codes is int32: it must be uint8."),),
)
PLAIN = without_last(WITH_BIAS, name="nf4_linear", cell=Nf4Linear, sizes=SIZES[1::4])
GRADIENT = Operator(
    name="nf4_linear_grad",
    op="nf4_linear",
    inputs=inputs_of_gradient,
    expected=padded_gradient,
    terms=lambda tokens, k, n: n + 1,
    function="Nf4LinearGrad",
    sizes=SIZES,
    threaded=(9, 130, 300),
    refused_size=(9, 130, 300),
    refused_shapes=(({"dy": (9, 299)}, "N is 299 in one input and 300 in another."),),
    refused_by_kernel=(("scales", "float16", "scales is float16: it must be float32."),),
)
GRADIENT_LIKE = Operator(
    name="nf4_linear_grad_like",
    op="nf4_linear",
    inputs=inputs_of_gradient_like,
    expected=gradient_like,
    terms=lambda tokens, k, n: n + 1,
    function="Nf4LinearGradLike",
    sizes=SIZES,
    threaded=(9, 130, 300),
    refused_size=(9, 130, 300),
    refused_shapes=(({"x": (9, 300)}, "the number of blocks of a row is 5 in one input and 3 in another."),),
)


class SquaredNorms(nn.Cell):
    """||W||^2 of each row, as the cells of DoRA ask for it."""

    def __init__(self):
        super().__init__()
        self.linear = Nf4Linear()

    def construct(self, after, codes, absmax, scales, offsets):
        return self.linear.squared_norms(after, codes, absmax, scales, offsets)


NORMS = Operator(
    name="nf4_squared_norms",
    op="nf4_linear",
    inputs=lambda dtype, k, n: {**normals(dtype, first=(1,)), **weight(n, k)},
    expected=lambda reference, first, *parts: reference.squared_norms(*parts),
    dtypes=("float32",),
    terms=lambda k, n: 4 * k,
    function="Nf4SquaredNorms",
    sizes=((37, 53), (1, 1), (64, 64), (70, 129), (200, 9), (300, 600), (64, 2049)),
    threaded=(300, 600),
    cell=SquaredNorms,
    cell_sizes=((37, 53), (1, 1), (200, 9)),
    refused_size=(70, 9),
    unchecked=("first", *WEIGHT),
    refused_shapes=(
        ({"codes": (8, 64)}, "N is 8 in one input and 9 in another."),
        ({"offsets": (2,)}, "the number of groups is 1 in one input and 2 in another."),
    ),
    refused_by_kernel=(
        ("first", "float16", "the first input is float16: it must be float32."),
        ("absmax", "int32", "absmax is int32: it must be uint8."),
    ),
)
FORMS = (PLAIN, WITH_BIAS, GRADIENT, GRADIENT_LIKE, NORMS)
