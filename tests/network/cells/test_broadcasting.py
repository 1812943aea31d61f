"""Operators that keep little memory on a CPU: outputs and gradients against NumPy, and what is kept."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora.network.cells.broadcasting import (
    BroadcastAdd,
    BroadcastMul,
    BroadcastSub,
    SiluProduct,
    Softmax,
    SwapHeads,
)
from tests.conftest import in_mode
from tests.support.saved_tensors import compiled_graph, saved_tensors

X = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
D_OUT = np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)
SHAPES = [(5,), (3, 1, 5), (2, 3, 4, 1), (1, 1, 4, 5), (1, 1, 1, 1)]


def summed(gradient, shape):
    """Returns a gradient, summed over the axes to which ``shape`` was broadcast."""
    padded = (1,) * (gradient.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return gradient.sum(axes, keepdims=True).reshape(shape)


class Products(nn.Cell):
    """x * b for each b, in one graph."""

    def __init__(self):
        super().__init__()
        self.mul = BroadcastMul()

    def construct(self, x, *factors):
        total = 0.0
        for factor in factors:
            total = total + self.mul(x, factor)
        return total


class Swapped(nn.Cell):
    """SwapHeads as MindFormers calls it."""

    def __init__(self):
        super().__init__()
        self.swap = SwapHeads()

    def construct(self, x):
        return self.swap(x, (0, 2, 1, 3))


def output_and_gradients(cell, d_out, *arrays):
    """Returns what a cell gives in graph mode, and the gradients of its inputs."""
    inputs = [Tensor(array) for array in arrays]
    with in_mode(ms.GRAPH_MODE):
        output = cell(*inputs).asnumpy()
        gradients = ops.GradOperation(get_all=True, sens_param=True)(cell)(*inputs, Tensor(d_out))
    return output, [gradient.asnumpy() for gradient in gradients]


def test_products_and_their_gradients_are_numpy_s():
    factors = [np.random.default_rng(2).standard_normal(shape).astype(np.float32) for shape in SHAPES]
    output, gradients = output_and_gradients(Products(), D_OUT, X, *factors)
    np.testing.assert_allclose(output, sum(X * factor for factor in factors), rtol=1e-5, atol=1e-6)
    expected = [sum(D_OUT * factor for factor in factors), *(summed(D_OUT * X, shape) for shape in SHAPES)]
    for gradient, wanted in zip(gradients, expected):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_differences_are_numpy_s(shape):
    b = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(BroadcastAdd()(Tensor(b), Tensor(X)).asnumpy(), b + X)
    np.testing.assert_array_equal(BroadcastSub()(Tensor(X), Tensor(b)).asnumpy(), X - b)


def test_softmax_and_its_gradient_are_numpy_s():
    output, (gradient,) = output_and_gradients(Softmax(), D_OUT, X)
    expected = np.exp(X) / np.exp(X).sum(-1, keepdims=True)
    np.testing.assert_allclose(output, expected, rtol=1e-5)
    product = expected * D_OUT
    wanted = product - expected * product.sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_heads_are_swapped_and_swapped_back():
    output, (gradient,) = output_and_gradients(Swapped(), np.ascontiguousarray(D_OUT.transpose(0, 2, 1, 3)), X)
    np.testing.assert_array_equal(output, X.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(gradient, D_OUT)


def test_a_silu_times_another_and_its_gradients_are_numpy_s():
    gate, up = 4 * X, X[::-1].copy()
    output, gradients = output_and_gradients(SiluProduct(), D_OUT, gate, up)
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(output, gate * sigmoid * up, rtol=1e-5, atol=1e-6)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    for gradient, wanted in zip(gradients, (D_OUT * up * slope, D_OUT * gate * sigmoid)):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


class Gated(nn.Cell):
    """The sum of the squares of SiluProduct of x and 2 x, each made by an operator, and its gradient."""

    def __init__(self):
        super().__init__()
        self.product = SiluProduct()
        self.gradient = ops.GradOperation(sens_param=True)

    def squares(self, x):
        return ops.square(self.product(ops.sin(x), ops.cos(x))).sum()

    def construct(self, x, dy):
        return self.gradient(self.squares)(x, dy)


def test_the_backward_of_a_silu_times_another_keeps_no_silu(graph_mode, tmp_path, monkeypatch):
    x, dy = Tensor(X.reshape(-1)), Tensor(1.0, ms.float32)
    kept = saved_tensors(compiled_graph(Gated(), [x, dy], tmp_path, monkeypatch))
    # The sine, the cosine and the product, which the square needs.
    assert sum(saved.shape == (X.size,) for saved in kept) == 3
