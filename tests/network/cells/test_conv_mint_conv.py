"""LoRAMintConv2d against mint.nn.Conv2d with W + scale B A, on stand-ins for the operators that a CPU lacks."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

from mindlora import LoraConfig, apply_lora, load_lora, save_lora
from mindlora.core.errors import UnsupportedCellError
from mindlora.network.cells.conv import LoRAMintConv2d
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from tests.support.mint_convolution import stand_in
from tests.support.networks import WeightedSum, as_array, assert_close, normal, randomize, snapshot

IN, OUT, RANK, ALPHA = 4, 6, 2, 3
SCALE = ALPHA / RANK
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
KINDS = {
    "plain": {"bias": False},
    "padded and strided": {"padding": (1, 2), "stride": (2, 1)},
    "padding in words": {"padding": "same"},
}


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    stand_in(monkeypatch)


def conv(**keys):
    cell = mint.nn.Conv2d(IN, OUT, (3, 2), **keys)
    randomize(cell.get_parameters(), seed=1)
    return cell


def adapted(cell, config=CONFIG):
    lora = LoRAMintConv2d.from_cell(cell, config)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def whole(lora, **keys):
    """A plain convolution with W + scale B A."""
    a, b = map(as_array, lora.lora_parameters())
    weight = as_array(lora.weight) + SCALE * np.einsum("or,rihw->oihw", b[:, :, 0, 0], a)
    cell = mint.nn.Conv2d(IN, OUT, (3, 2), **keys)
    cell.weight.set_data(Tensor(weight.astype(np.float32)))
    if lora.has_bias:
        cell.bias.set_data(lora.bias.value())
    return cell


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_one_convolution(mode, kind):
    cell, x = conv(**KINDS[kind]), Tensor(normal(2, IN, 7, 6))
    lora = LoRAMintConv2d.from_cell(cell, CONFIG)
    y = lora(x).asnumpy()
    np.testing.assert_array_equal(y, cell(x).asnumpy())
    randomize(lora.lora_parameters(), seed=2)
    merged, weights = whole(lora, **KINDS[kind]), Tensor(normal(*y.shape, seed=4))
    assert_close(lora(x), as_array(merged(x)))
    of_x, (of_a, of_b) = ms.grad(WeightedSum(lora), 0, lora.lora_parameters())(x, weights)
    expected, of_weight = ms.grad(WeightedSum(merged), 0, merged.weight)(x, weights)
    a, b = map(as_array, lora.lora_parameters())
    assert_close(of_x, as_array(expected))
    assert_close(of_a, SCALE * np.einsum("or,oihw->rihw", b[:, :, 0, 0], as_array(of_weight)))
    assert_close(of_b, SCALE * np.einsum("rihw,oihw->or", a, as_array(of_weight))[:, :, None, None])


def test_groups(pynative_mode):
    lora = adapted(conv(groups=2), LoraConfig(lora_rank=4, lora_alpha=4))
    x = Tensor(normal(2, IN, 5, 5))
    a, b = lora.lora_parameters()
    assert a.shape == (4, IN, 3, 2) and b.shape == (OUT, 2, 1, 1)
    low = lora.base.conv2d(x, a, None, (1, 1), (0, 0), (1, 1), 1).asnumpy()
    update = np.concatenate(
        [
            np.einsum("or,nrhw->nohw", as_array(b)[:3, :, 0, 0], low[:, :2]),
            np.einsum("or,nrhw->nohw", as_array(b)[3:, :, 0, 0], low[:, 2:]),
        ],
        axis=1,
    )
    assert_close(lora(x), as_array(lora._adopted[0](x)) + update)


class Vision(nn.Cell):
    """A convolution and a linear cell of mindspore.mint."""

    def __init__(self):
        super().__init__()
        self.patch = mint.nn.Conv2d(IN, OUT, 3, padding=1)
        self.proj = mint.nn.Linear(OUT, 5)

    def construct(self, x):
        return self.proj(self.patch(x).mean((2, 3)))


def vision():
    network = Vision()
    randomize(network.get_parameters(), seed=1)
    return network


def test_a_network_of_mint_is_adapted_saved_loaded_and_merged(tmp_path, graph_mode):
    network, x = vision(), Tensor(normal(2, IN, 5, 5))
    report = apply_lora(network, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, target_modules=["patch", "proj"]))
    assert report.replaced == ("patch", "proj")
    randomize([*network.patch.lora_parameters(), *network.proj.lora_parameters()], seed=2)
    y, before = network(x).asnumpy(), snapshot(network)
    save_lora(network, str(tmp_path / "adapter"))
    fresh = vision()
    load_lora(fresh, str(tmp_path / "adapter"))
    np.testing.assert_array_equal(fresh(x).asnumpy(), y)
    merge_lora(network)
    assert_close(network(x), y)
    unmerge_lora(network)
    assert snapshot(network) == before
    merge_and_unload(network)
    assert (type(network.patch), type(network.proj)) == (mint.nn.Conv2d, mint.nn.Linear)
    assert_close(network(x), y)


@pytest.mark.parametrize("keys", [{"dilation": 2}, {"padding": 1, "padding_mode": "reflect"}])
def test_convolutions_that_peft_cannot_adapt_either(keys):
    with pytest.raises(UnsupportedCellError, match="^Conv2d of mindspore.mint has dilation .* and padding_mode"):
        LoRAMintConv2d.from_cell(conv(**keys), CONFIG)


def test_a_sharded_linear_cell_of_mint_is_refused():
    network = vision()
    network.proj.dense.in_strategy = ((2, 1), (1, 1), (1,))
    with pytest.raises(UnsupportedCellError, match="proj: Linear of mindspore.mint is sharded"):
        apply_lora(network, LoraConfig(target_modules=["proj"]))
