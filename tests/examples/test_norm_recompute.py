"""GroupNorm and SiLU recomputed as one: the same loss and gradients to the last bit, and a feature map less kept."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import TargetError
from mindlora.network.tree import lora_cells
from tests.support.networks import randomize
from tests.support.saved_tensors import compiled_graph, saved_tensors
from tests.support.small_unet import NormActivation, ResnetBlock2D, recompute_norm_activation, small_unet


class Block(nn.Cell):
    """sum(block(x, time)^2)."""

    def __init__(self):
        super().__init__()
        self.block = ResnetBlock2D(4, 8, 6, 2)

    def construct(self, x, time):
        return (self.block(x, time) ** 2).sum()


def slopes(recomputed):
    network = Block()
    randomize(network.get_parameters(), 1)
    rng = np.random.default_rng(0)
    inputs = [ms.Tensor(rng.normal(size=shape).astype(np.float32)) for shape in ((2, 4, 3, 5), (2, 6))]
    if recomputed:
        assert recompute_norm_activation(network, *inputs) == ("block.norm1", "block.norm2")
    names = [p.name for p in network.get_parameters()]
    apply_lora(network, LoraConfig(lora_rank=2, target_modules=["time_emb_proj", "conv1", "conv2"]))
    freeze_base(network)
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], 2)
    parameters = network.trainable_params()
    loss, found = ms.value_and_grad(network.set_train(), None, parameters)(*inputs)
    return names, {"loss": loss.asnumpy(), **{p.name: slope.asnumpy() for p, slope in zip(parameters, found)}}


def test_loss_and_gradients_are_the_same(mode):
    (names, plain), (names_again, again) = slopes(False), slopes(True)
    assert names == names_again
    assert plain.keys() == again.keys() and len(plain) == 7
    for name, value in plain.items():
        assert value.any()
        np.testing.assert_allclose(again[name], value, rtol=0, atol=1e-6 * np.abs(value).max())


def test_all_pairs_of_a_unet_are_found():
    paths = recompute_norm_activation(small_unet())
    assert len(paths) == 17 and {"conv_norm_out", "mid_block.resnets.1.norm2"} < set(paths)


def test_fewer_tensors_are_kept(graph_mode, tmp_path, monkeypatch):
    kept = []
    for recomputed in (False, True):
        network = Block()
        if recomputed:
            recompute_norm_activation(network)
        apply_lora(network, LoraConfig(lora_rank=2, target_modules=["time_emb_proj"]))
        freeze_base(network)
        step = ms.value_and_grad(network.set_train(), None, network.trainable_params())
        inputs = [ms.Tensor(np.ones(shape, np.float32)) for shape in ((2, 4, 16, 16), (2, 6))]
        folder = tmp_path / str(recomputed)
        kept.append(sum(tensor.size for tensor in saved_tensors(compiled_graph(step, inputs, folder, monkeypatch))))
    assert kept[1] < 0.7 * kept[0]


def test_found_side_by_side_in_a_sequential_cell(pynative_mode):
    network = nn.SequentialCell(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 1))
    x = ms.Tensor(np.random.default_rng(0).normal(size=(1, 2, 3, 3)).astype(np.float32))
    before = network(x).asnumpy()
    assert recompute_norm_activation(network, x) == ("1",)
    assert type(network[1]) is NormActivation
    np.testing.assert_array_equal(network(x).asnumpy(), before)
    with pytest.raises(TargetError, match="^The network has no GroupNorm with a SiLU after it"):
        recompute_norm_activation(network)


def test_a_silu_that_is_used_elsewhere_too_is_refused(pynative_mode):
    shared = nn.SiLU()
    network = nn.SequentialCell(nn.Conv2d(4, 4, 3), shared, nn.GroupNorm(2, 4), shared)
    with pytest.raises(TargetError, match="1 is one cell with the SiLU behind a GroupNorm, and has none before"):
        recompute_norm_activation(network)
    twice = nn.SequentialCell(nn.GroupNorm(2, 4), shared, nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), shared)
    x = ms.Tensor(np.random.default_rng(0).normal(size=(2, 4, 3, 5)).astype(np.float32))
    assert recompute_norm_activation(twice, x) == ("0", "3")


def test_a_block_of_videos_is_refused_where_it_is_called(mode):
    network = ResnetBlock2D(4, 8, 6, 2)
    recompute_norm_activation(network)
    with pytest.raises(ValueError, match="for blocks of pictures.* this input has 3"):
        network.nonlinearity(ms.Tensor(np.ones((2, 3, 6), np.float32)))


class Backwards(nn.Cell):
    """diffusers' names, but the activation comes first."""

    def __init__(self):
        super().__init__()
        self.norm1, self.nonlinearity = nn.GroupNorm(2, 4), nn.SiLU()

    def construct(self, x):
        return self.norm1(self.nonlinearity(x))


def test_a_block_that_calls_them_in_another_order_is_left_as_it_was(pynative_mode):
    network = Backwards()
    x = ms.Tensor(np.random.default_rng(0).normal(size=(1, 4, 3, 3)).astype(np.float32))
    before = network(x).asnumpy()
    with pytest.raises(TargetError, match="^With norm1 recomputed, the network's output on the probe is another"):
        recompute_norm_activation(network, x)
    assert type(network.norm1) is nn.GroupNorm
    np.testing.assert_array_equal(network(x).asnumpy(), before)
