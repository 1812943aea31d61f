"""multi_lora_delta beyond tests/ops/test_contract.py: axes, skipped rows, indices too many or too large, wide pools."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from tests.ops.contract import network_of
from tests.ops.operators.multi_lora_delta import MULTI_LORA_DELTA, K, N
from tests.support.native import assert_near, call, values
from tests.support.op_paths import PATHS
from tests.support.pooled_adapters import MAX_RANK, SLOTS, TRUE_RANKS, pooled

TERMS = MAX_RANK * K**0.5


def case(tokens, kind):
    """The six inputs."""
    return [array for array, _ in MULTI_LORA_DELTA.inputs("float32", tokens, kind).values()]


@pytest.mark.parametrize("pool", ["float16", "bfloat16"])
def test_a_pool_of_16_bits_is_widened_as_it_is_read(isa, reference, pool):
    inputs = case(31, "uniform")
    inputs[2] = pooled(K + N, dtype=pool)[0]
    dtypes = ["float32", "float32", pool, "int32", "float32", "int32"]
    found = call("MultiLoraDelta", list(zip(inputs, dtypes)), inputs[0].shape, "float32")
    assert_near(found, reference.multi_lora_delta(*inputs), "float32", TERMS)


@pytest.mark.parametrize("shape", [(1, 5), (2, 1, 3)])
def test_all_axes_of_x_but_the_last_are_tokens(each_path, reference, shape):
    y0, x, *pool, indices = case(int(np.prod(shape)), "uniform")
    expected = reference.multi_lora_delta(y0, x, *pool, indices).reshape(*shape, N)
    y = network_of(MULTI_LORA_DELTA)(*map(Tensor, [y0, x.reshape(*shape, K), *pool, indices]))
    assert_near(values(y), expected, "float32", TERMS)


def test_indices_after_the_tokens_are_not_looked_at(each_path, reference):
    """A server keeps one Parameter, as long as its largest step; tokens come and go."""
    net, (y0, x, *pool, indices) = network_of(MULTI_LORA_DELTA), case(5, "uniform")
    longer = np.append(indices, np.int32([SLOTS, 10**9, -1]))
    shapes = [Tensor(shape=[None, N], dtype=ms.float32), Tensor(shape=[1, None, K], dtype=ms.float32)]
    net.set_inputs(*shapes, *map(Tensor, [*pool, longer]))
    for tokens in (5, 1, 3):
        inputs = [y0[:tokens], x[None, :tokens], *pool, longer]
        expected = reference.multi_lora_delta(y0[:tokens], x[:tokens], *pool, indices[:tokens])
        assert_near(values(net(*map(Tensor, inputs)))[0], expected, "float32", TERMS)


def test_rows_without_an_adapter_stay_bit_for_bit(each_path):
    inputs = case(31, "skipped")
    y = values(network_of(MULTI_LORA_DELTA)(*map(Tensor, inputs)))
    skipped = inputs[5] < 0
    empty = ~skipped & (TRUE_RANKS[np.maximum(inputs[5], 0)] == 0)
    assert skipped.any() and empty.any()
    np.testing.assert_array_equal(y[skipped | empty], inputs[0][skipped | empty])
    # Every other adapter has a nonzero scale, so it must change its rows.
    assert (y != inputs[0])[~(skipped | empty)].any(axis=1).all()


def test_each_row_depends_on_its_own_adapter_alone(each_path):
    inputs = case(8, "distinct")
    before = values(network_of(MULTI_LORA_DELTA)(*map(Tensor, inputs)))
    inputs[2][4, :64] *= 2
    after = values(network_of(MULTI_LORA_DELTA)(*map(Tensor, inputs)))
    assert ((before != after).any(axis=1) == (inputs[5] == 4)).all()


def test_no_tokens(each_path):
    # Not in the table's sizes: after them, MindSpore's own operators give wrong sums in the same graph.
    assert network_of(MULTI_LORA_DELTA)(*map(Tensor, case(0, "uniform"))).shape == (0, N)


def test_a_row_with_an_index_beyond_the_pool_is_nan_where_no_error_can_be_raised(mode, monkeypatch, library):
    # A kernel on a CPU refuses it: see the table.
    monkeypatch.setenv("MINDLORA_BACKEND", PATHS[-1])
    inputs = case(4, "distinct")
    inputs[5][2] = SLOTS
    y = values(network_of(MULTI_LORA_DELTA)(*map(Tensor, inputs)))
    assert (np.isnan(y).all(axis=1) == [False, False, True, False]).all()
