"""integer_linear of both widths and its gradient: what is tested of them."""

import functools

import numpy as np
from mindspore import nn

from mindlora.core.numerics.integers import pack
from mindlora.ops.integer_linear import IntegerLinear
from tests.ops.contract import Operator, normals
from tests.support.native import normal, rounded

# The kernels of few tokens and of many, groups of one half of a block and of several blocks, odd numbers of rows, and
# several threads and tiles.
SIZES = (
    *((0, 64, 53, 32), (1, 64, 1, 64), (2, 128, 53, 64), (3, 192, 9, 32), (5, 384, 129, 96), (8, 576, 70, 576)),
    *((9, 64, 53, 32), (17, 192, 9, 192), (33, 384, 37, 128), (513, 128, 70, 64)),
    *((1, 1088, 600, 32), (7, 512, 512, 128), (70, 576, 1030, 64)),
)
# Scales with which the numbers of a weight are about as large as 1.
STEP = {4: 0.2, 8: 0.01}


def weight(bits, k, n, size, dtype):
    """The three tensors of a weight [N, K] in groups of ``size`` columns; all codes and zeros occur."""
    rng = np.random.default_rng(bits)
    if bits == 8:
        codes, zeros = (rng.integers(-128, 128, shape, np.int8) for shape in ((n, k), (n, k // size)))
    else:
        codes, zeros = rng.integers(0, 16, (n, k), np.uint8), rng.integers(0, 17, (n, k // size), np.uint8)
    scales = rounded(normal(n, k // size) * np.float32(STEP[bits]), dtype)
    return {"codes": (pack(codes, bits), "uint8"), "zeros": (zeros.view(np.uint8), "uint8"), "scales": (scales, dtype)}


def inputs(dtype, tokens, k, n, size, bits=4):
    # Scales of the other dtypes are in turn beside each dtype of x.
    held = {"float32": "bfloat16", "bfloat16": "float16", "float16": "float32"}[dtype]
    return {**normals(dtype, x=(tokens, k)), **weight(bits, k, n, size, held)}


def inputs_of_gradient(dtype, tokens, k, n, size, bits=4):
    return {**normals(dtype, dy=(tokens, n)), **weight(bits, k, n, size, dtype)}


def forward(bits):
    return Operator(
        name=f"int{bits}_linear",
        op="integer_linear",
        inputs=functools.partial(inputs, bits=bits),
        expected=lambda reference, *arrays: reference.integer_linear(*arrays, bits),
        terms=lambda tokens, k, n, size: 2 * k,
        function=f"Int{bits}Linear",
        sizes=SIZES,
        threaded=(9, 128, 300, 64),
        cell=functools.partial(IntegerLinear, bits),
        cell_sizes=((31, 64, 53, 32), (1, 64, 1, 64), (8, 192, 9, 96), (0, 64, 53, 32)),
        gradients=lambda reference, dy, x, *parts: {"x": reference.integer_linear_grad(dy, *parts, bits)},
        gradient_sizes=((3, 64, 4, 32), (33, 128, 37, 128)),
        gradient_terms=2 * 37,
        refused_size=(5, 128, 9, 32),
        alike=(("x",), ("scales",)),
        refused_shapes=(
            ({"x": (5, 64)}, "K is 64 in one input and 128 in another."),
            ({"x": (7,)}, "x has 1 dimensions: it must have 2."),
            ({"zeros": (8, 4)}, "N is 9 in one input and 8 in another."),
            ({"scales": (9, 2)}, "the number of groups of a row is 4 in one input and 2 in another."),
            (
                {"zeros": (9, 3), "scales": (9, 3)},
                "a row of 128 numbers has 3 groups: they must be alike, of a multiple of 32 numbers.",
            ),
            ({"x": (5, 96), "codes": (9, 12 * bits)}, "K is 96: it must be a multiple of 64."),
        ),
        refused_by_kernel=(
            ("codes", "int32", "codes is int32: it must be uint8."),
            ("scales", "int32", "scales is int32: it must be float32, float16 or bfloat16."),
        ),
    )


def backward(bits):
    return Operator(
        name=f"int{bits}_linear_grad",
        op="integer_linear",
        inputs=functools.partial(inputs_of_gradient, bits=bits),
        expected=lambda reference, *arrays: reference.integer_linear_grad(*arrays, bits),
        terms=lambda tokens, k, n, size: 2 * n,
        function=f"Int{bits}LinearGrad",
        sizes=SIZES,
        threaded=(9, 128, 300, 64),
        refused_size=(9, 128, 300, 64),
        refused_shapes=(({"dy": (9, 299)}, "N is 299 in one input and 300 in another."),),
    )


class SquaredNorms(nn.Cell):
    """||W||^2 of each row, as the cells of DoRA ask for it."""

    def __init__(self, bits):
        super().__init__()
        self.linear = IntegerLinear(bits)

    def construct(self, after, codes, zeros, scales):
        return self.linear.squared_norms(after, codes, zeros, scales)


def norms(bits):
    def inputs(dtype, k, n, size, held="bfloat16"):
        return {**normals(dtype, first=(1,)), **weight(bits, k, n, size, held)}

    return Operator(
        name=f"int{bits}_squared_norms",
        op="integer_linear",
        inputs=inputs,
        expected=lambda reference, first, *parts: reference.squared_norms(*parts, bits),
        dtypes=("float32",),
        # Numbers are about as large as 2: the codes are far from some zeros.
        terms=lambda k, n, size, held="": 16 * k,
        function=f"Int{bits}SquaredNorms",
        sizes=(*(size[1:] for size in SIZES[1:]), (192, 9, 32, "float16"), (192, 9, 64, "float32")),
        threaded=(576, 1030, 64),
        cell=functools.partial(SquaredNorms, bits),
        cell_sizes=((64, 53, 32), (64, 1, 64), (192, 9, 96)),
        refused_size=(128, 9, 32),
        unchecked=("first", "codes", "zeros", "scales"),
        refused_shapes=(
            ({"zeros": (8, 4)}, "N is 9 in one input and 8 in another."),
            ({"codes": (9, 12 * bits)}, "K is 96: it must be a multiple of 64."),
        ),
        refused_by_kernel=(
            ("first", "float16", "the first input is float16: it must be float32."),
            ("scales", "int32", "scales is int32: it must be float32, float16 or bfloat16."),
        ),
    )


FORMS = (forward(4), forward(8), backward(4), backward(8), norms(4), norms(8))
