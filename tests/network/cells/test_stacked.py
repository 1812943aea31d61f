"""StackedLoRADense against numpy: each adapter computes on its own rows, and zeros stay without a gradient."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.stacked import StackedLoRADense
from tests.support.networks import WeightedSum, as_array, assert_close, linear_cell, lora_forward, normal

IN, OUT, ROWS = 7, 5, 3
RANKS = (2, 4)


@pytest.fixture(params=["dense with bias", "linear with silu"])
def stacked(request, mindformers):
    """Adapters of ranks 2 and 4, and between them one that is not on the cell; the cell's activation in numpy."""
    cell, activation = linear_cell(request.param, IN, OUT, mindformers)
    alone = [LoRADense.from_dense(cell, LoraConfig(lora_rank=rank, lora_alpha=3)) for rank in RANKS]
    for one in alone:
        one.name_parts("layer.wq")
    stacked = StackedLoRADense.from_cells(cell, [alone[0], None, alone[1]])
    a, b = np.zeros((3, 4, IN), np.float32), np.zeros((3, OUT, 4), np.float32)
    for adapter, rank in ((0, 2), (2, 4)):
        a[adapter, :rank], b[adapter, :, :rank] = normal(rank, IN, seed=adapter), normal(OUT, rank, seed=adapter + 5)
    stacked.mindpet_delta_lora_a.set_data(Tensor(a))
    stacked.mindpet_delta_lora_b.set_data(Tensor(b))
    return stacked, a, b, activation


def test_each_adapter_computes_on_its_own_rows(stacked):
    cell, a, b, activation = stacked
    x = normal(3 * ROWS, 2, IN)
    weight, bias = as_array(cell.weight), None if cell.bias is None else as_array(cell.bias)
    expected = [
        lora_forward(rows, weight, a[adapter], b[adapter], scale, bias, activation)
        for adapter, (rows, scale) in enumerate(zip(np.split(x, 3), (3 / 2, 0, 3 / 4)))
    ]
    assert_close(cell(Tensor(x)), np.concatenate(expected))


def test_what_lies_beyond_a_rank_has_no_gradient(stacked):
    cell, a, b, _ = stacked
    x, weights = Tensor(normal(3 * ROWS, IN)), Tensor(normal(3 * ROWS, OUT, seed=9))
    parameters = ms.ParameterTuple([cell.mindpet_delta_lora_a, cell.mindpet_delta_lora_b])
    of_a, of_b = (each.asnumpy() for each in ms.grad(WeightedSum(cell), None, parameters)(x, weights))
    assert not of_a[0, 2:].any() and not of_b[0, :, 2:].any() and not of_a[1].any() and not of_b[1].any()
    assert of_a[0, :2].all() and of_b[0, :, :2].all() and of_a[2].all() and of_b[2].all()
