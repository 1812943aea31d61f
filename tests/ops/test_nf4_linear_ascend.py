"""nf4_linear on the ascend path, with a substitute for the kernel: the inputs that it gets, and how its W is used.

Nothing here runs on an NPU. The kernel itself is tested in tests/ops/ascendc/test_nf4_dequantize.py.
"""

import glob
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.primitive import constexpr

from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.ops import Nf4Linear, backend, operator_cell, quantize
from tests.ops.contract import GradientOfFirst, assert_gradients, tensors_of
from tests.ops.operators.nf4_linear import PLAIN, WITH_BIAS
from tests.support.fewer_cases import pairs_with
from tests.support.native import assert_near, normal, tensor, values

OPERATOR = "nf4_linear"
ASKED = []


@constexpr
def note(dimensions, dtype):
    """Runs once for each call in a compiled graph, and at each call in PyNative."""
    ASKED.append((dimensions, dtype))


class Decode(nn.Cell):
    """The kernel in plain operators: W [N, K] in the dtype of like, which is [_, K], or a vector for whole blocks."""

    def __init__(self):
        super().__init__()
        self.plain = Nf4Linear()

    def construct(self, like, codes, absmax, scales, offsets):
        note(len(like.shape), like.dtype)
        if len(like.shape) == 1:
            like = ops.zeros((1, 64 * absmax.shape[1]), like.dtype)
        return self.plain.weight(like, like, codes, absmax, scales, offsets)


@pytest.fixture(autouse=True)
def _kernel(library, monkeypatch):
    """Makes cells created from now on take the ascend path."""
    monkeypatch.setenv("MINDLORA_BACKEND", "composed")
    kernel = Decode()
    monkeypatch.setattr(operator_cell, "choose", lambda op: backend.Choice(op, "ascend", "a stand-in"))
    monkeypatch.setattr(operator_cell, "make_kernel", lambda path, op, inputs, writes: kernel)
    ASKED.clear()


def tensors(dtype, k, n, *more):
    array = quantize(normal(n, k, seed=1))
    return (
        [
            tensor(more[0], dtype),
            *map(Tensor, (array.codes, array.absmax, array.scales, array.offsets)),
            *(tensor(values_, dtype) for values_ in more[1:]),
        ],
        [array.codes, array.absmax, array.scales, array.offsets],
    )


def each_case():
    """Yields (mode, dtype, table, size): float32 in both modes, the others in one each; no tokens at all."""
    for number, (dtype, *size, form) in enumerate(pairs_with([(3, 128, 33), (31, 70, 64)], [PLAIN, WITH_BIAS])):
        for mode in (0, 1) if dtype == "float32" else (number % 2,):
            yield mode, dtype, form, tuple(size)
    yield 0, "float32", PLAIN, (0, 64, 9)


@pytest.mark.parametrize("mode, dtype, form, size", each_case(), indirect=["mode"])
def test_values_and_gradients_are_those_of_the_reference(mode, dtype, form, size):
    case, cell = form.case(dtype, size), form.cell()
    assert cell.choice.path == "ascend"
    assert_near(values(cell(*tensors_of(case.inputs))), case.expected, dtype, case.terms)
    assert_gradients(form, size, dtype)
    # The kernel gets x for its shape, so that x is kept for the backward, only if the blocks do not determine K.
    assert set(ASKED) == {(1 if size[1] % 64 == 0 else 2, ms.float32)}


@pytest.mark.parametrize("k", [64, 70])
def test_w_has_the_dtype_of_x_where_products_are_computed_in_it(k):
    """As on an NPU; a CPU, which has a float16 MatMul, computes them in float32."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    inputs, _ = tensors("float16", k, 9, normal(3, k))
    cell = Nf4Linear()
    cell.products.widen = False
    ops.GradOperation()(cell)(*inputs)
    assert [(1 if k % 64 == 0 else 2, ms.float16)] * 2 == ASKED


@pytest.mark.parametrize("k", [64, 70])
@pytest.mark.parametrize("known", [True, False])
def test_shapes_that_are_not_known(graph_mode, reference, k, known):
    net = GradientOfFirst(Nf4Linear())
    inputs, parts = tensors("float32", k, 33, normal(3, k))
    net.set_inputs(
        Tensor(shape=[None, k if known else None], dtype=ms.float32),
        *inputs[1:],
        Tensor(shape=[None, 33], dtype=ms.float32),
    )
    for tokens in (3, 31, 1):
        dy = normal(tokens, 33, seed=9)
        dx = net(tensor(normal(tokens, k), "float32"), *inputs[1:], tensor(dy, "float32"))
        assert_near(values(dx), reference.nf4_linear_grad(dy, *parts, k)[0], "float32", 33)


def test_a_cell_of_a_network_takes_it(mode):
    weight = normal(9, 70)
    dense = nn.Dense(70, 9, weight_init=Tensor(weight))
    cell = NF4Dense.from_dense(dense)
    assert cell.base.matmul.choice.path == "ascend"
    x = normal(2, 3, 70, seed=5)
    plain = cell.plain_cell()
    np.testing.assert_allclose(cell(Tensor(x)).asnumpy(), plain(Tensor(x)).asnumpy(), rtol=1e-4, atol=1e-4)
    assert ASKED


class Trained(nn.Cell):
    """A loss over a frozen layer whose W is a parameter, as in a network that trains."""

    def __init__(self, k):
        super().__init__()
        inputs, _ = tensors("float32", k, 64, normal(1, k))
        self.codes, self.absmax, self.scales, self.offsets = (
            Parameter(value, name=f"part{i}", requires_grad=False) for i, value in enumerate(inputs[1:])
        )
        self.linear = Nf4Linear()

    def construct(self, x):
        return (self.linear(x, self.codes, self.absmax, self.scales, self.offsets) ** 2).sum()


class Step(nn.Cell):
    """Loss and gradient, as a train step has them."""

    def __init__(self, k):
        super().__init__()
        self.both = ms.value_and_grad(Trained(k), 0, None)

    def construct(self, x):
        return self.both(x)


@pytest.mark.parametrize("k", [64, 70])
def test_the_backward_decodes_again_and_keeps_no_weight(tmp_path, k):
    """The compiler merges what is computed twice from the same inputs; the two decodings must not be merged."""
    ms.set_context(mode=ms.GRAPH_MODE, save_graphs=2, save_graphs_path=str(tmp_path))
    try:
        Step(k)(Tensor(normal(3, k)))
    finally:
        ms.set_context(save_graphs=0)
    (graph,) = glob.glob(f"{tmp_path}/**/*_validate_*.ir", recursive=True)
    with open(graph, encoding="utf-8") as file:
        # Each decoding looks up the low and the high halves.
        assert len(re.findall(r"= \w*Gather\(", file.read())) == 4


class ShapeOfKernel(nn.Cell):
    """The shape that MindSpore infers for W; the kernel is not run."""

    def __init__(self):
        super().__init__()
        self.kernel = operator_cell.CpuKernel("Nf4Dequantize", 5)

    def construct(self, like, codes, absmax, scales, offsets):
        w = self.kernel(like, codes, absmax, scales, offsets)
        return w.shape, w.dtype


def parts_of(like, codes, absmax, groups, offsets=None):
    return [
        Tensor(np.zeros(like, np.float16)),
        Tensor(np.zeros(codes, np.uint8)),
        Tensor(np.zeros(absmax, np.uint8)),
        Tensor(np.zeros(groups, np.float32)),
        Tensor(np.zeros(groups if offsets is None else offsets, np.float32)),
    ]


@pytest.mark.parametrize("like, columns", [((3, 100), 100), ((1, 65), 65), ((5, 128), 128), ((1,), 128), ((77,), 128)])
def test_the_shape_of_w_is_inferred(like, columns):
    ms.set_context(mode=ms.GRAPH_MODE)
    shape, dtype = ShapeOfKernel()(*parts_of(like, (9, 64), (9, 2), (1,)))
    assert tuple(shape) == (9, columns) and dtype == ms.float16


@pytest.mark.parametrize(
    "parts, message",
    [
        (((3, 129), (9, 64), (9, 2), (1,)), "the number of blocks of a row is 3 in one input and 2 in another"),
        (((3, 64), (9, 64), (9, 2), (1,)), "the number of blocks of a row is 1 in one input and 2 in another"),
        (((3, 1, 64), (9, 64), (9, 2), (1,)), "x has 3 dimensions: it must have 2"),
        (((1,), (9, 65), (9, 2), (1,)), "the number of blocks of a row is 3 in one input and 2 in another"),
        (((1,), (8, 64), (9, 2), (1,)), "N is 8 in one input and 9 in another"),
        (((1,), (9, 64), (9, 2), (4,)), "the number of groups is 1 in one input and 4 in another"),
        (((1,), (9, 64), (9, 2), (1,), (2,)), "the number of groups is 1 in one input and 2 in another"),
    ],
)
def test_wrong_shapes_are_refused(parts, message):
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(RuntimeError, match=f"mindlora nf4_dequantize: {message}"):
        ShapeOfKernel()(*parts_of(*parts))
