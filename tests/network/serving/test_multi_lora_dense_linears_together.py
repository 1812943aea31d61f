"""LinearsTogether: to the last bit what its cells give one by one, or no such cell at all."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.serving.multi_lora_dense import LinearsTogether, MultiLoRADense
from tests.support.networks import normal
from tests.support.op_paths import PATHS

pytestmark = pytest.mark.skipif(PATHS[0] != "cpu", reason="products in bfloat16 are for a CPU")
IN, OUTS, SLOTS, MAX_RANK = 70, (53, 5, 16), 3, 4
WHOSE = np.int32([2, -1, 0, 1, 1, 2, -1])


class OneByOne(nn.Cell):
    def __init__(self, cells):
        super().__init__(auto_prefix=False)
        self.cells_of_x = nn.CellList(cells, auto_prefix=False)

    def construct(self, x):
        outputs = ()
        for cell in self.cells_of_x:
            outputs += (cell(x),)
        return outputs


def pooled(out, slots_of_tokens, packed=False, has_bias=False, activation=None, rounds=True, pool_dtype=None):
    """Returns a MultiLoRADense with adapters and gains in its slots."""
    dense = nn.Dense(IN, out, has_bias=has_bias, activation=activation, dtype=ms.bfloat16 if rounds else ms.float32)
    dense.weight.set_data(Tensor(normal(out, IN, seed=out), dense.weight.dtype))
    dense.dtype = ms.float32
    if packed:
        dense = nn.Dense(IN, out, has_bias=has_bias, activation=activation)
        dense.weight.set_data(Tensor(normal(out, IN, seed=out)))
        dense = NF4Dense.from_dense(dense, "base")
    cell = MultiLoRADense.from_cell(dense, f"cell{out}", SLOTS, MAX_RANK, slots_of_tokens, pool_dtype, rounds)
    cell.lora_pool.set_data(Tensor(normal(SLOTS, MAX_RANK, IN + out, seed=out), cell.lora_pool.dtype))
    cell.lora_ranks.set_data(Tensor(np.int32([4, 1, 2])))
    cell.lora_scales.set_data(Tensor(np.float32([0.5, -1, 2])))
    cell.lora_gains.set_data(Tensor(normal(SLOTS + 1, out, seed=out)))
    return cell


def slots():
    return Parameter(Tensor(WHOSE), name="slots_of_tokens", requires_grad=False)


@pytest.mark.parametrize("count, gained", [(2, False), (3, True)], ids=["two", "three with gains"])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"has_bias": True, "pool_dtype": ms.float16},
        {"packed": True, "activation": "silu"},
        {"packed": True, "has_bias": True},
    ],
    ids=str,
)
def test_it_is_its_cells_to_the_last_bit(graph_mode, library, kind, count, gained):
    of_all = slots()
    cells = [pooled(out, of_all, **kind) for out in OUTS[:count]]
    for cell in cells:
        cell.add_flags(gained=gained, few=True)
    x = Tensor(normal(1, len(WHOSE), IN))
    found = LinearsTogether.of(cells)(x)
    for y, wanted in zip(found, OneByOne(cells)(x)):
        assert y.shape == wanted.shape and y.dtype == wanted.dtype
        np.testing.assert_array_equal(y.asnumpy(), wanted.asnumpy())


@pytest.mark.parametrize("packed", [False, True])
def test_in_pynative_too(pynative_mode, library, packed):
    of_all = slots()
    bases = [nn.Dense(IN, out, has_bias=False, dtype=ms.bfloat16) for out in OUTS]
    if packed:
        bases = [NF4Dense.from_dense(nn.Dense(IN, out, has_bias=False)) for out in OUTS]
    cells = []
    for number, base in enumerate(bases):
        base.dtype = ms.float32
        cells.append(MultiLoRADense.from_cell(base, str(number), SLOTS, MAX_RANK, of_all, None, True))
    x = Tensor(normal(1, len(WHOSE), IN))
    for y, cell in zip(LinearsTogether.of(cells)(x), cells):
        np.testing.assert_array_equal(y.asnumpy(), cell(x).asnumpy())


def test_cells_that_one_operator_cannot_compute_have_none(graph_mode, library):
    of_all = slots()
    plain = pooled(53, of_all)
    others = [
        pooled(5, of_all, rounds=False),
        pooled(5, of_all, packed=True),
        pooled(5, of_all, has_bias=True),
        pooled(5, of_all, pool_dtype=ms.float16),
        nn.Dense(IN, 5),
    ]
    assert LinearsTogether.of([plain, pooled(5, of_all)]) is not None
    assert [LinearsTogether.of([plain, other]) for other in others] == [None] * len(others)
