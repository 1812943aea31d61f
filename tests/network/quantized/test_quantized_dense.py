"""IntegerDense and QLoRADense on it against numpy on the decoded weight: equation, gradients, float again, a merge."""

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense
from mindlora.core.numerics.dtypes import BFLOAT16
from mindlora.core.numerics.integers import IntegerArray, IntegerForm, dequantize, pack, unpack
from mindlora.network.merge import in_float, merge_and_unload, sample
from mindlora.network.quantized.nf4 import QLoRADense, parameter_count
from mindlora.network.quantized.quantized_dense import IntegerDense, integer_array
from tests.support.networks import as_array, assert_close, gradients, lora_forward, normal, normal_dense, randomize

IN, OUT, RANK, ALPHA = 128, 5, 3, 4.5
SCALE = ALPHA / RANK
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
dense = functools.partial(normal_dense, IN, OUT)


@pytest.fixture(params=[4, 8])
def bits(request):
    return request.param


def filled(cell, bits, groups=4):
    """Returns an IntegerDense in the place of ``cell``, with random integers and scales in bfloat16."""
    made = IntegerDense.from_dense(cell, "wq", IntegerForm(bits, groups, BFLOAT16))
    rng = np.random.default_rng(bits)
    made.weight.set_data(Tensor(rng.integers(0, 256, made.weight.shape, np.uint8)))
    zeros = rng.integers(-9, 9, made.weight_zeros.shape, np.int8) if bits == 8 else rng.integers(0, 17, (OUT, groups))
    made.weight_zeros.set_data(Tensor(zeros.astype(np.int8).view(np.uint8)))
    scales = rng.uniform(0.5, 1, (OUT, groups)) * {4: 0.2, 8: 0.01}[bits]
    made.weight_scales.set_data(Tensor(scales.astype(np.float32), ms.bfloat16))
    return made


def adapted(cell, bits):
    lora = QLoRADense.from_cell(filled(cell, bits), CONFIG)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def decoded(cell):
    return dequantize(integer_array(cell)).astype(np.float64)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_unpacked_as_they_were_packed(bits):
    codes = np.random.default_rng(0).integers(-128, 128, (3, IN), np.int8)
    codes = codes if bits == 8 else codes.view(np.uint8) & 15
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits), codes)
    array = IntegerArray(pack(codes, bits), np.full((3, 2), 5, np.uint8), np.full((3, 2), 0.5, np.float32), bits)
    np.testing.assert_array_equal(dequantize(array), (codes.astype(np.float32) - 5) / 2)


@pytest.mark.parametrize("shape", [(3, IN), (2, 9, IN)], ids=str)
def test_forward_is_the_equation_on_the_decoded_weight(mode, bits, shape):
    cell = dense()
    bias = as_array(cell.bias)
    made, x = filled(cell, bits), normal(*shape)
    assert_close(made(Tensor(x)), lora_forward(x, decoded(made), np.zeros((1, IN)), np.zeros((OUT, 1)), 1, bias))
    lora = QLoRADense.from_cell(made, CONFIG)
    randomize(lora.lora_parameters(), seed=2)
    a, b = (as_array(p) for p in lora.lora_parameters())
    for training in (True, False):
        lora.set_train(training)
        assert_close(lora(Tensor(x)), lora_forward(x, decoded(lora), a, b, SCALE, bias))


def test_gradients_reach_x_a_and_b_and_nothing_else(mode, bits):
    lora = adapted(dense(), bits)
    lora.bias.requires_grad = False
    lora.set_train()
    x, weights = normal(11, IN), normal(11, OUT, seed=4)
    assert [p.name for p in lora.trainable_params()] == [p.name for p in lora.lora_parameters()]
    dx, da, db = gradients(lora, x, weights)
    a, b = (as_array(p) for p in lora.lora_parameters())
    assert_close(dx, weights @ (decoded(lora) + SCALE * b @ a))
    assert_close(da.astype(ms.float32), SCALE * (weights @ b).T @ x)
    assert_close(db.astype(ms.float32), SCALE * weights.T @ (x @ a.T))


def test_its_parameters_are_the_bits_of_the_form(bits):
    made = IntegerDense.from_dense(dense(has_bias=False), "layers.0.wq", IntegerForm(bits, 2, np.dtype("f2")))
    names = {parameter.name: (parameter.shape, str(parameter.dtype)) for parameter in made.get_parameters()}
    assert names == {
        "layers.0.wq.weight": ((OUT, IN * bits // 8), "UInt8"),
        "layers.0.wq.weight_zeros": ((OUT, 2), "UInt8"),
        "layers.0.wq.weight_scales": ((OUT, 2), "Float16"),
    }
    assert not any(parameter.requires_grad for parameter in made.get_parameters())
    assert parameter_count(made) == IN * OUT and made.quantization == f"int{bits}"


def test_back_in_float_it_is_the_decoded_cell(bits):
    cell = dense()
    lora = adapted(cell, bits)
    x = normal(3, IN)
    expected = lora(Tensor(x)).asnumpy()
    back = in_float(lora)
    assert type(back) is LoRADense and back.lora_parameters() == lora.lora_parameters()
    np.testing.assert_array_equal(back.weight.asnumpy(), decoded(lora).astype(np.float32))
    assert_close(back(Tensor(x)), expected.astype(np.float64))
    lora.base_cell.drop_float()
    assert not hasattr(cell, "weight")


def test_the_first_rows_of_a_weight_and_of_its_change(bits):
    lora = adapted(dense(), bits)
    weight, change = sample(lora, 2)
    np.testing.assert_array_equal(weight, decoded(lora)[:2].astype(np.float32))
    a, b = (as_array(p) for p in lora.lora_parameters())
    assert_close(change, (SCALE * b @ a)[:2])


def test_a_merge_is_into_the_decoded_weight(bits):
    network = nn.SequentialCell(adapted(dense(), bits)).set_train(False)
    (lora,) = network
    a, b = (as_array(p) for p in lora.lora_parameters())
    expected = decoded(lora) + SCALE * b @ a
    merge_and_unload(network)
    assert type(network[0]) is nn.Dense
    assert_close(network[0].weight, expected)
