"""Cells with a gradient of their own give it to Tensor.backward() too, bit by bit as to value_and_grad."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import mindlora.network.registry  # noqa: F401
from mindlora.core.errors import BackendError
from mindlora.network.quantized.nf4 import DecodedWeight
from mindlora.ops import LoraDelta, MultiLoraDelta, MultiLoraLinear, Nf4Linear
from mindlora.ops.lora_dropout import LoraDropout
from mindlora.ops.operator_cell import CellWithBprop
from tests.ops.operators import OPERATORS, lora_delta, multi_lora_linear, nf4_linear
from tests.support.backward import backward_gradients
from tests.support.native import normal

TOKENS, K, N = 5, 70, 9

# Whose cells are put into networks in graph mode alone.
GRAPH_MODE_ALONE = ("mindlora.network.cells.broadcasting", "mindlora.training.model.")


def inputs_of(operator, *size):
    """Returns the tensors of a table's inputs."""
    return [Tensor(array, getattr(ms, dtype)) for array, dtype in operator.inputs("float32", *size).values()]


def parameters(tensors):
    """Returns a Parameter of each tensor."""
    return [Parameter(tensor, name=f"input{i}") for i, tensor in enumerate(tensors)]


def packed_linear():
    """Returns x and the four tensors of a weight in 4 bits."""
    return inputs_of(nf4_linear.PLAIN, TOKENS, K, N)


# How each cell is made, and its inputs.
CELLS = {
    operator.name: (operator.cell, lambda operator=operator: inputs_of(operator, *operator.gradient_sizes[-1]))
    for operator in OPERATORS
    if operator.gradients
}
CELLS["decoded_weight"] = (lambda: DecodedWeight(3, K, ms.float32), packed_linear)


@pytest.fixture(autouse=True)
def _pynative(pynative_mode):
    """Tensor.backward() is PyNative's."""


@pytest.mark.parametrize("name", CELLS)
def test_backward_gives_what_value_and_grad_gives_bit_by_bit(path, name):
    make, tensors = CELLS[name]
    cell = make()
    inputs = parameters(tensors())
    dout = Tensor(normal(*cell(*inputs).shape, seed=8))

    gradients = backward_gradients(cell, inputs, dout)

    expected = ms.grad(lambda *values: (cell(*values) * dout).sum(), tuple(range(len(inputs))))(*inputs)
    for i, parameter in enumerate(inputs):
        if parameter.dtype == ms.float32:
            np.testing.assert_array_equal(gradients[i], expected[i].asnumpy(), err_msg=parameter.name)
    assert gradients[0].any() or name == "decoded_weight"


def test_backward_reaches_what_is_before_the_cell(path):
    # The cell's inputs are results here, and its result goes on.
    delta = LoraDelta()
    *tensors, scale = inputs_of(lora_delta.LORA_DELTA, TOKENS, K, N, 3)
    inputs = parameters(tensors)

    def loss(y0, x, a, b):
        return (ops.tanh(delta(ops.tanh(y0), ops.tanh(x), a, b, scale)) ** 2).sum()

    gradients = backward_gradients(loss, inputs, Tensor(1.0))

    for gradient, expected in zip(gradients, ms.grad(loss, (0, 1, 2, 3))(*inputs)):
        np.testing.assert_array_equal(gradient, expected.asnumpy())


def test_a_frozen_input_gets_no_gradient(path):
    inputs = parameters(packed_linear())
    for parameter in inputs[1:]:
        parameter.requires_grad = False

    x_gradient, *others = backward_gradients(Nf4Linear(), inputs, Tensor(normal(TOKENS, N)))

    assert x_gradient.any() and others == [None] * 4


def test_backward_is_refused_where_there_is_no_gradient(path):
    inputs = parameters(inputs_of(multi_lora_linear.PLAIN, TOKENS, "uniform", K, N))
    with pytest.raises(BackendError, match="multi_lora_linear has no gradient"):
        backward_gradients(MultiLoraLinear(), inputs, Tensor(normal(TOKENS, N)))


def test_every_cell_with_a_bprop_is_one_of_them():
    # Among the modules that this process has imported.
    left, with_bprop = [nn.Cell], set()
    while left:
        kind = left.pop()
        left.extend(kind.__subclasses__())
        is_for_both_modes = not kind.__module__.startswith(GRAPH_MODE_ALONE)
        if kind.__module__.startswith("mindlora.") and is_for_both_modes and "bprop" in vars(kind):
            with_bprop.add(kind)
    assert {DecodedWeight, LoraDropout, MultiLoraDelta} < with_bprop
    assert {kind for kind in with_bprop if not issubclass(kind, CellWithBprop)} == set()
