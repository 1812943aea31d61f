"""MultiLoRADense against numpy: each token's adapter inside the activation, in every dtype that a CPU has."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora import LoRADense
from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.nf4 import dequantize
from mindlora.network.quantized.nf4 import NF4Dense, nf4_array
from mindlora.network.serving.multi_lora_dense import MultiLoRADense
from tests.support.lora_dense import CONFIG, EACH_CELL, IN, OUT, Each
from tests.support.networks import as_array, assert_close, lora_forward, normal, normal_dense

SLOTS, MAX_RANK = 4, 6
RANKS, SCALES = np.int32([3, 0, 6, 1]), np.float32([0.5, 9.0, -1.5, 2.0])
# Nine tokens at most; the ones after those of a call must not matter.
WHOSE = np.int32([2, -1, 0, 3, 1, 0, 2, -1, 3])
FEW = pytest.mark.parametrize("few", [False, True], ids=["many", "few"])


def pooled(cell, few, whose=WHOSE):
    """Returns a MultiLoRADense over ``cell``, whose pool holds NaN beyond the ranks."""
    slots_of_tokens = Parameter(Tensor(whose), name="slots_of_tokens", requires_grad=False)
    found = MultiLoRADense.from_cell(cell, "cell", SLOTS, MAX_RANK, slots_of_tokens)
    found.add_flags(few=few)
    pool = normal(SLOTS, MAX_RANK, found.in_channels + found.out_channels, seed=5)
    for block, rank in zip(pool, RANKS):
        block[rank:] = np.nan
    found.lora_pool.set_data(Tensor(pool, found.lora_pool.dtype))
    found.lora_ranks.set_data(Tensor(RANKS))
    found.lora_scales.set_data(Tensor(SCALES))
    return found


def oracle(cell, x, activation=None, weight=None, whose=WHOSE):
    """Returns what a MultiLoRADense must compute, token by token."""
    weight = as_array(cell.weight) if weight is None else weight
    bias = as_array(cell.bias) if cell.has_bias else None
    pool, rows = as_array(cell.lora_pool), x.reshape(-1, x.shape[-1])
    result = []
    for row, slot in zip(rows, whose):
        block = pool[slot, : RANKS[slot] if slot >= 0 else 0]
        a, b = block[:, : cell.in_channels], block[:, cell.in_channels :].T
        result.append(lora_forward(row[None], weight, a, b, SCALES[slot], bias, activation)[0])
    return np.reshape(result, (*x.shape[:-1], cell.out_channels))


@EACH_CELL
@FEW
def test_each_token_has_its_own_adapter_inside_the_activation(mode, plain, few):
    cell, activation = plain
    found = pooled(cell, few)
    inputs = [normal(*shape) for shape in ((9, IN), (1, 5, IN), (3, 1, IN), (2, 1, 3, IN))]
    for x, y in zip(inputs, Each(found)(*map(Tensor, inputs))):
        assert_close(y, oracle(found, x, activation))


@FEW
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_gains_multiply_what_is_added_to_the_bias(mode, few, has_bias):
    cell = nn.Dense(IN, OUT, has_bias=has_bias)
    found = pooled(cell, few)
    gains = normal(SLOTS + 1, OUT, seed=8)
    gains[[0, SLOTS]] = 0
    found.lora_gains.set_data(Tensor(gains))
    x = normal(1, 7, IN)
    without = found(Tensor(x)).asnumpy()
    found.add_flags(gained=True)
    y = nn.SequentialCell(found)(Tensor(x)).asnumpy()
    bias = as_array(cell.bias) if has_bias else 0
    assert_close(y, without + gains[WHOSE[:7]] * (without - bias))
    # Tokens of the base, and of an adapter without gains.
    plain_rows = np.isin(WHOSE[:7], (-1, 0))
    np.testing.assert_array_equal(y[0, plain_rows], without[0, plain_rows])


@FEW
def test_shapes_and_adapters_may_change_between_calls(mode, few):
    found, network = pooled(normal_dense(IN, OUT), few), nn.SequentialCell()
    network.append(found)
    network.set_inputs(Tensor(shape=[None, None, IN], dtype=ms.float32))
    for shape, turn in (((1, 9), 0), ((4, 1), 3), ((1, 1), 5), ((2, 3), 1)):
        whose = np.roll(WHOSE, turn)
        found.slots_of_tokens.set_data(Tensor(whose))
        x = normal(*shape, IN, seed=turn)
        assert_close(network(Tensor(x)), oracle(found, x, whose=whose))


@FEW
def test_a_slot_that_was_rewritten_is_what_is_computed_with(mode, few):
    found = pooled(normal_dense(IN, OUT), few)
    x = normal(9, IN)
    before = found(Tensor(x)).asnumpy()
    pool = found.lora_pool.asnumpy()
    pool[2] *= 2
    found.lora_pool.set_data(Tensor(pool))
    after = found(Tensor(x)).asnumpy()
    assert ((before != after).any(axis=1) == (WHOSE == 2)).all()
    assert_close(after, oracle(found, x))


@FEW
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_base_in_nf4(library, mode, few, has_bias):
    cell = NF4Dense.from_dense(normal_dense(70, OUT, has_bias=has_bias, activation="relu"))
    found = pooled(cell, few)
    assert found.quantization == "nf4"
    x = normal(9, 70)
    expected = oracle(found, x, lambda y: np.maximum(y, 0), dequantize(nf4_array(cell)))
    assert_close(found(Tensor(x)), expected)


@FEW
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("input_dtype", ["float16", "float32"])
def test_half_precision(mode, few, dtype, input_dtype):
    if dtype == "bfloat16" and not few:
        pytest.skip("a CPU has no bfloat16 MatMul")
    found = pooled(normal_dense(IN, OUT, dtype=getattr(ms, dtype)), few)
    assert found.lora_pool.dtype == getattr(ms, dtype)
    x = Tensor(normal(9, IN), getattr(ms, input_dtype))
    y = found(x)
    assert y.dtype == x.dtype
    # The oracle uses the rounded parameters, so only the rounding of x, the products and y remains.
    assert_close(y, oracle(found, as_array(x)), dtype)


@FEW
def test_mindformers_linear_computes_in_its_own_dtype(mode, mindformers, few):
    """The weight may be stored in another."""
    linear = mindformers.modules.layers.Linear(
        IN, OUT, compute_dtype=ms.float16, param_init_type=ms.float32, has_bias=True, activation="silu"
    )
    found = pooled(linear, few)
    assert (found.weight.dtype, found.lora_pool.dtype) == (ms.float32, ms.float16)
    x = normal(1, 9, IN)
    y = found(Tensor(x))
    assert y.dtype == ms.float32
    assert_close(y, oracle(found, x, lambda y: y / (1 + np.exp(-y))), "float16")


def test_an_empty_pool_is_the_plain_cell_bit_for_bit(graph_mode, plain):
    cell, _ = plain
    slots_of_tokens = Parameter(Tensor(np.zeros(9, np.int32)), name="slots_of_tokens")
    found = MultiLoRADense.from_cell(cell, "cell", SLOTS, MAX_RANK, slots_of_tokens)
    x = Tensor(normal(3, 3, IN))
    np.testing.assert_array_equal(found(x).asnumpy(), cell(x).asnumpy())


def test_it_shares_the_base_s_parameters_and_trains_nothing():
    cell = normal_dense(IN, OUT)
    found = pooled(cell, False)
    assert found.weight is cell.weight and found.bias is cell.bias
    pools = [found.lora_pool, found.lora_ranks, found.lora_scales]
    assert [parameter.name for parameter in pools] == ["cell.lora_pool", "cell.lora_ranks", "cell.lora_scales"]
    assert not any(parameter.requires_grad for parameter in [*pools, found.slots_of_tokens])
    expected = "in_channels=7, out_channels=5, has_bias=True, slots=4, max_rank=6, compute_dtype=Float32"
    assert expected in repr(found)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.Conv2d(3, 4, 1), "Conv2d is none of nn.Dense, mint.nn.Linear and MindFormers' Linear: pass"),
        (lambda: LoRADense.from_dense(nn.Dense(IN, OUT), CONFIG), "The cell is a LoRADense already"),
        (lambda: pooled(nn.Dense(IN, OUT), False), "MultiLoRADense is none of nn.Dense,"),
    ],
)
def test_refused_cells(make, message):
    with pytest.raises(UnsupportedCellError, match=message):
        pooled(make(), False)


def test_sharded_cells_are_refused():
    cell = nn.Dense(IN, OUT)
    cell.matmul.shard(((2, 1), (1, 1)))
    with pytest.raises(UnsupportedCellError, match="is sharded"):
        pooled(cell, False)
