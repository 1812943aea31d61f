"""Several products of rounded_linear in one call: to the last bit those of calls of their own."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.core.errors import BackendError
from mindlora.ops.rounded_linear import RoundedLinear, RoundedLinears
from tests.ops.contract import tensors_of
from tests.ops.operators.rounded_linear import IN_NF4, WITH_BIAS
from tests.support.native import values
from tests.support.op_paths import PATHS

pytestmark = pytest.mark.skipif(PATHS[0] != "cpu", reason="NPUs have no kernel for it")
KINDS = pytest.mark.parametrize("kind", ["bfloat16", "nf4"])
# K and each N, the last of them enough for several threads.
SIZES = [(70, (53, 5)), (130, (64, 1, 37)), (1061, (530, 24, 253))]


def batch(kind, tokens, k, outs):
    """Returns x, weights, pools, indices and biases of products with one x."""
    table = IN_NF4 if kind == "nf4" else WITH_BIAS
    inputs = [tensors_of(table.inputs("float32", tokens, k, n, "skipped")) for n in outs]
    weights, pools = ([tuple(each[part]) for each in inputs] for part in (slice(1, -5), slice(-5, -2)))
    # Each its own numbers, where sizes are alike.
    return inputs[0][0], tuple(weights), tuple(pools), inputs[0][-2], tuple(each[-1] for each in inputs)


def assert_each_as_alone(kind, has_bias, tokens, k, outs):
    together, alone = RoundedLinears(kind == "nf4", has_bias, len(outs)), RoundedLinear(kind == "nf4", has_bias)
    x, weights, pools, indices, biases = batch(kind, tokens, k, outs)
    found = together(x, weights, pools, indices, biases if has_bias else ())
    assert len(found) == len(outs)
    for y, weight, pool, bias in zip(found, weights, pools, biases):
        wanted = alone(x, weight, *pool, indices, *[bias] * has_bias)
        assert y.dtype == ms.float32 and y.shape == wanted.shape
        np.testing.assert_array_equal(values(y), values(wanted))


@KINDS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("k, outs", SIZES)
def test_each_is_what_a_call_of_its_own_gives(pynative_mode, library, kind, has_bias, k, outs):
    for tokens in (1, 8, 67):
        assert_each_as_alone(kind, has_bias, tokens, k, outs)


@KINDS
def test_each_is_what_a_call_of_its_own_gives_in_a_graph(graph_mode, library, kind):
    assert_each_as_alone(kind, kind == "nf4", 8, 70, (53, 5))


def test_x_of_any_number_of_axes_and_tokens(graph_mode, library):
    cell = RoundedLinears(False, False, 2)
    x, weights, pools, indices, _ = batch("bfloat16", 12, 70, (53, 5))
    wanted = cell(x, weights, pools, indices)
    found = cell(Tensor(x.asnumpy().reshape(2, 6, 70)), weights, pools, indices)
    for y, flat, width in zip(found, wanted, (53, 5)):
        assert y.shape == (2, 6, width)
        np.testing.assert_array_equal(values(y).reshape(12, width), values(flat))


def refused(kind, change):
    """Returns the message of a call whose inputs were changed."""
    x, weights, pools, indices, biases = batch(kind, 4, 70, (53, 5))
    inputs = {"weights": list(weights), "pools": list(map(list, pools)), "biases": list(biases)}
    change(inputs)
    weights, pools, biases = tuple(inputs["weights"]), tuple(map(tuple, inputs["pools"])), tuple(inputs["biases"])
    with pytest.raises((BackendError, RuntimeError)) as error:
        RoundedLinears(kind == "nf4", True, 2)(x, weights, pools, indices, biases)[0].asnumpy()
    return str(error.value)


def test_a_second_weight_of_another_width_is_refused(library, pynative_mode):
    def change(inputs):
        inputs["weights"][1] = (Tensor(np.zeros((5, 71), np.float32)).astype(ms.bfloat16),)

    assert "rounded_linear: K is 70 in one input and 71 in another." in refused("bfloat16", change)


def test_pools_of_two_dtypes_are_refused(library, pynative_mode):
    def change(inputs):
        inputs["pools"][1][0] = inputs["pools"][1][0].astype(ms.bfloat16)

    assert "rounded_linear: pool is bfloat16: it must be float32." in refused("nf4", change)


def test_a_bias_of_16_bits_is_refused(library, pynative_mode):
    def change(inputs):
        inputs["biases"][1] = inputs["biases"][1].astype(ms.float16)

    assert refused("bfloat16", change) == "rounded_linear (cpu): bias is Float16: it must be Float32."
