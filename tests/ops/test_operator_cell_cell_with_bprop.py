"""Cells with a gradient of their own give it to Tensor.backward() too, bit by bit as to value_and_grad."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import mindlora.network.registry  # noqa: F401
from mindlora.core.errors import BackendError
from mindlora.network.quantized.nf4_experts import DecodedWeight
from mindlora.ops import (
    LoraDelta,
    LoraLinear,
    LoraLinearWithBias,
    MultiLoraDelta,
    MultiLoraLinear,
    Nf4Linear,
    Nf4LinearWithBias,
    quantize,
)
from mindlora.ops.lora_dropout import LoraDeltaWithDropout, LoraDropout
from mindlora.ops.masked_attention import MaskedAttention
from mindlora.ops.operator_cell import CellWithBprop
from mindlora.ops.rms_norm import RmsNorm
from mindlora.ops.rotary_embedding import RotaryEmbedding
from tests.support.backward import backward_gradients
from tests.support.native import normal
from tests.support.pooled_adapters import pooled, popularity

TOKENS, K, N, R = 5, 70, 9, 3
SCALE = np.float32([0.5])
SEED, RATE = np.int32([7]), np.float32([0.3])


# Whose cells are put into networks in graph mode alone.
GRAPH_MODE_ALONE = ("mindlora.network.cells.broadcasting", "mindlora.training.model.")


def floats(*shapes):
    """Returns normal values of each shape."""
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def packed_linear():
    """Returns x and the four tensors of a weight in 4 bits."""
    weight = quantize(normal(N, K, seed=3))
    return [normal(TOKENS, K), weight.codes, weight.absmax, weight.scales, weight.offsets]


def delta_inputs():
    """Returns y0, x, A, B and the scale of lora_delta."""
    return [*floats((TOKENS, N), (TOKENS, K), (R, K), (N, R)), SCALE]


def pool_inputs():
    """Returns y0, x, pool, ranks, scales and indices of multi_lora_delta."""
    return [*floats((TOKENS, N), (TOKENS, K)), *pooled(K + N), popularity("uniform", TOKENS)]


def linear_inputs():
    """Returns x, W, A, B and the scale of lora_linear."""
    return [*floats((TOKENS, K), (N, K), (R, K), (N, R)), SCALE]


def attention_inputs():
    """Returns q, k, v, mask and scale of masked_attention."""
    mask = np.triu(np.full((1, 1, TOKENS, TOKENS), -10000, np.float32), 1)
    return [*floats((1, TOKENS, 4, 6), (1, TOKENS, 2, 6), (1, TOKENS, 2, 6)), mask, SCALE]


# How each cell is made, and its inputs.
CELLS = {
    "lora_delta": (LoraDelta, delta_inputs),
    "lora_dropout": (LoraDropout, lambda: [normal(TOKENS, K), SEED, RATE]),
    "lora_delta_with_dropout": (LoraDeltaWithDropout, lambda: [*delta_inputs(), SEED, RATE]),
    "lora_linear": (LoraLinear, linear_inputs),
    "lora_linear_with_bias": (LoraLinearWithBias, lambda: [*linear_inputs(), normal(N, seed=9)]),
    "multi_lora_delta": (MultiLoraDelta, pool_inputs),
    "nf4_linear": (Nf4Linear, packed_linear),
    "nf4_linear_with_bias": (Nf4LinearWithBias, lambda: [*packed_linear(), normal(N, seed=9)]),
    "masked_attention": (MaskedAttention, attention_inputs),
    "rms_norm": (RmsNorm, lambda: [*floats((TOKENS, K), (K,)), SCALE]),
    "rotary_embedding": (RotaryEmbedding, lambda: floats((TOKENS, K), (TOKENS, 14), (TOKENS, 14))),
    "decoded_weight": (lambda: DecodedWeight(3, K, ms.float32), packed_linear),
}


@pytest.fixture(autouse=True)
def _pynative(pynative_mode):
    """Tensor.backward() is PyNative's."""


@pytest.mark.parametrize("name", CELLS)
def test_backward_gives_what_value_and_grad_gives_bit_by_bit(path, name):
    make, arrays = CELLS[name]
    cell = make()
    inputs = [Parameter(Tensor(array), name=f"input{i}") for i, array in enumerate(arrays())]
    dout = Tensor(normal(*cell(*inputs).shape, seed=8))

    gradients = backward_gradients(cell, inputs, dout)

    expected = ms.grad(lambda *values: (cell(*values) * dout).sum(), tuple(range(len(inputs))))(*inputs)
    for i, parameter in enumerate(inputs):
        if parameter.dtype == ms.float32:
            np.testing.assert_array_equal(gradients[i], expected[i].asnumpy(), err_msg=parameter.name)
    assert gradients[0].any() or name == "decoded_weight"


def test_backward_reaches_what_is_before_the_cell(path):
    # The cell's inputs are results here, and its result goes on.
    delta, scale = LoraDelta(), Tensor(SCALE)
    arrays = floats((TOKENS, N), (TOKENS, K), (R, K), (N, R))
    inputs = [Parameter(Tensor(array), name=f"input{i}") for i, array in enumerate(arrays)]

    def loss(y0, x, a, b):
        return (ops.tanh(delta(ops.tanh(y0), ops.tanh(x), a, b, scale)) ** 2).sum()

    gradients = backward_gradients(loss, inputs, Tensor(1.0))

    for gradient, expected in zip(gradients, ms.grad(loss, (0, 1, 2, 3))(*inputs)):
        np.testing.assert_array_equal(gradient, expected.asnumpy())


def test_a_frozen_input_gets_no_gradient(path):
    inputs = [Parameter(Tensor(array), name=f"input{i}") for i, array in enumerate(packed_linear())]
    for parameter in inputs[1:]:
        parameter.requires_grad = False

    x_gradient, *others = backward_gradients(Nf4Linear(), inputs, Tensor(normal(TOKENS, N)))

    assert x_gradient.any() and others == [None] * 4


def test_backward_is_refused_where_there_is_no_gradient(path):
    arrays = [*floats((TOKENS, K), (N, K)), *pooled(K + N), popularity("uniform", TOKENS)]
    inputs = [Parameter(Tensor(array), name=f"input{i}") for i, array in enumerate(arrays)]
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
