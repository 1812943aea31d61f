"""multi_lora_delta and multi_lora_linear beyond tests/ops/test_contract.py: axes, tokens and indices, skipped rows."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.core.errors import BackendError
from tests.ops.contract import arrays_of, network_of, tensors_of
from tests.ops.operators import multi_lora_linear
from tests.ops.operators.multi_lora_delta import MULTI_LORA_DELTA, K, N, adapters
from tests.support.native import DTYPES, assert_near, call, normal, values
from tests.support.op_paths import PATHS
from tests.support.pooled_adapters import MAX_RANK, SLOTS, TRUE_RANKS

LINEAR = multi_lora_linear.WITH_BIAS
OPERATORS = (MULTI_LORA_DELTA, *multi_lora_linear.FORMS)
EACH = pytest.mark.parametrize("operator", OPERATORS, ids=[operator.name for operator in OPERATORS])
TERMS = 1 + K + MAX_RANK * K**0.5


def native(operator, inputs, dtype="float32"):
    shape = (*inputs["x"][0].shape[:-1], inputs["pool"][0].shape[2] - inputs["x"][0].shape[-1])
    return call(operator.function, list(inputs.values()), shape, dtype)


def changed(inputs, **arrays):
    """Returns Inputs with other arrays."""
    return {**inputs, **{name: (array, inputs[name][1]) for name, array in arrays.items()}}


@EACH
@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 1, 3)], ids=str)
def test_all_axes_of_x_but_the_last_are_tokens(each_path, operator, shape):
    case = operator.case("float32", (int(np.prod(shape)), "uniform"))
    inputs = changed(case.inputs, x=case.inputs["x"][0].reshape(*shape, K))
    y = values(network_of(operator)(*tensors_of(inputs)))
    assert_near(y, case.expected.reshape(*shape, N), "float32", TERMS)


@EACH
def test_indices_after_the_tokens_are_not_looked_at(each_path, operator):
    """A server keeps one Parameter, as long as its largest step; tokens come and go."""
    net, of_tokens = network_of(operator), {"y0": [None, N], "x": [1, None, K]}
    for tokens in (5, 1, 3):
        case = operator.case("float32", (tokens, "uniform"))
        longer = np.append(case.inputs["indices"][0], np.int32([SLOTS, 10**9, -1] * 3))[:8]
        inputs = changed(case.inputs, x=case.inputs["x"][0][None], indices=longer)
        tensors = dict(zip(inputs, tensors_of(inputs)))
        opened = {name: Tensor(shape=shape, dtype=ms.float32) for name, shape in of_tokens.items() if name in inputs}
        if tokens == 5:
            net.set_inputs(*{**tensors, **opened}.values())
        assert_near(values(net(*tensors.values()))[0], case.expected, "float32", TERMS)


@EACH
def test_no_tokens(each_path, operator):
    # Not in the table's sizes: after them, MindSpore's own operators give wrong sums in the same graph.
    assert network_of(operator)(*tensors_of(operator.inputs("float32", 0, "uniform"))).shape == (0, N)


@EACH
def test_a_row_with_an_index_beyond_the_pool_is_nan_where_no_error_can_be_raised(
    pynative_mode, library, monkeypatch, operator
):
    # A kernel on a CPU refuses it: see the tables.
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[-1])
    inputs = operator.inputs("float32", 4, "distinct")
    inputs["indices"][0][2] = SLOTS
    y = values(network_of(operator)(*tensors_of(inputs)))
    assert (np.isnan(y).all(axis=1) == [False, False, True, False]).all()


def test_rows_without_an_adapter_stay_bit_for_bit(each_path):
    inputs = MULTI_LORA_DELTA.inputs("float32", 31, "skipped")
    y0, *_, indices = arrays_of(inputs)
    y = values(network_of(MULTI_LORA_DELTA)(*tensors_of(inputs)))
    plain = (indices < 0) | (TRUE_RANKS[np.maximum(indices, 0)] == 0)
    assert (indices < 0).any() and (plain & (indices >= 0)).any()
    np.testing.assert_array_equal(y[plain], y0[plain])
    # Every other adapter has a nonzero scale, so it must change its rows.
    assert (y != y0)[~plain].any(axis=1).all()


def test_each_row_depends_on_its_own_adapter_alone(each_path):
    inputs = MULTI_LORA_DELTA.inputs("float32", 8, "distinct")
    before = values(network_of(MULTI_LORA_DELTA)(*tensors_of(inputs)))
    inputs["pool"][0][4, :64] *= 2
    after = values(network_of(MULTI_LORA_DELTA)(*tensors_of(inputs)))
    assert ((before != after).any(axis=1) == (inputs["indices"][0] == 4)).all()


@pytest.mark.parametrize("pool", ["float16", "bfloat16"])
def test_a_pool_of_16_bits_is_widened_as_it_is_read(isa, pool):
    inputs = {**MULTI_LORA_DELTA.inputs("float32", 31, "uniform"), **adapters(K, N, dtype=pool)}
    expected = MULTI_LORA_DELTA.result_of(arrays_of(inputs))
    assert_near(native(MULTI_LORA_DELTA, inputs), expected, "float32", TERMS)


@pytest.mark.parametrize("pool", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
def test_weights_and_pools_of_16_bits_are_widened_as_they_are_read(isa, weight, pool):
    for tokens in (1, 17):
        # More than one part of K that a block of rows takes, and an odd end.
        inputs = LINEAR.inputs("float32", tokens, "uniform", 1061)
        inputs.update(W=(normal(N, 1061, dtype=weight), weight), **adapters(1061, N, dtype=pool))
        expected = LINEAR.result_of(arrays_of(inputs))
        assert_near(native(LINEAR, inputs), expected, "float32", 1 + 1061 + MAX_RANK * 1061**0.5)


def test_a_token_of_the_base_has_the_bits_that_it_has_without_any_adapter(isa):
    inputs = LINEAR.inputs("float32", 12, "skipped", 300, 260)
    mixed, indices = native(LINEAR, inputs), inputs["indices"][0]
    base = native(LINEAR, changed(inputs, indices=np.full(12, -1, np.int32)))
    plain = (indices < 0) | (TRUE_RANKS[np.maximum(indices, 0)] == 0)
    assert plain.any() and not plain.all()
    np.testing.assert_array_equal(mixed[plain], base[plain])
    assert (mixed != base)[~plain].any(axis=1).all()


@pytest.mark.parametrize("operator", multi_lora_linear.FORMS, ids=[form.name for form in multi_lora_linear.FORMS])
def test_a_gradient_is_refused(each_path, operator):
    with pytest.raises(BackendError, match="multi_lora_linear has no gradient"):
        ms.grad(operator.cell(), 0)(*tensors_of(operator.inputs("float32", 4, "distinct")))
