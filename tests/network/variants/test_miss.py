"""MiSSDense against numpy: the equation, gradients of its block, merging, files, what it refuses."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora, trainable_summary
from mindlora.core.errors import ConfigError, UnsupportedCellError
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.tree import lora_cells
from mindlora.network.variants.miss import MiSSDense
from tests.support.lora_dense import Each
from tests.support.networks import (
    TinyModel,
    as_array,
    assert_close,
    gradients,
    linear_cell,
    normal,
    normal_dense,
    randomize,
    snapshot,
)

IN, OUT, RANK = 7, 5, 3
CONFIG = LoraConfig(lora_rank=4, use_miss=True, target_modules=["wq", "wk", "w2"])


@pytest.fixture(params=["dense", "dense with relu", "linear with silu"])
def plain(request, mindformers):
    """A linear cell with normal weights, and its activation in numpy."""
    return linear_cell(request.param, IN, OUT, mindformers)


def adapted(cell, rank=RANK, **options):
    """Returns a MiSSDense over ``cell`` with a normal block."""
    miss = MiSSDense.from_cell(cell, LoraConfig(lora_rank=rank, use_miss=True, **options))
    randomize(miss.lora_parameters(), seed=2)
    return miss


def shards(x, rank):
    """Returns x with the elements i of all shards added up, one after the other."""
    summed = np.zeros((*x.shape[:-1], rank), np.float32)
    for column in range(x.shape[-1]):
        summed[..., column % rank] += x[..., column]
    return summed


def oracle(miss, x, activation=None):
    (block,) = map(as_array, miss.lora_parameters())
    y = x @ as_array(miss.weight).T + shards(x, miss.lora_rank) @ block.T
    if miss.bias is not None:
        y = y + as_array(miss.bias)
    return y if activation is None else activation(y)


def model(config=CONFIG):
    network = TinyModel()
    randomize(network.get_parameters(), seed=5)
    if config:
        apply_lora(network, config)
    return network


def test_a_new_cell_is_the_plain_one_and_a_trained_one_the_equation(mode, plain):
    cell, activation = plain
    inputs = [normal(3, IN), normal(2, 1, 3, IN)]
    tensors = [Tensor(x) for x in inputs]
    expected = [y.asnumpy() for y in Each(cell)(*tensors)]
    miss = MiSSDense.from_cell(cell, LoraConfig(lora_rank=RANK, use_miss=True))
    for y, wanted in zip(Each(miss)(*tensors), expected):
        np.testing.assert_array_equal(y.asnumpy(), wanted)
    miss = adapted(miss.plain_cell())
    for x, y in zip(inputs, Each(miss)(*tensors)):
        assert_close(y, oracle(miss, x, activation))


@pytest.mark.parametrize("in_channels, out_channels, rank", [(1, 5, 1), (12, 1, 4), (13, 3, 4), (3, 4, 8)])
def test_shards_that_divide_the_inputs_and_that_do_not(in_channels, out_channels, rank):
    miss, x = adapted(normal_dense(in_channels, out_channels), rank), normal(3, in_channels)
    assert_close(miss(Tensor(x)), oracle(miss, x))
    a, b = miss.pair()
    assert a.shape == (rank, in_channels)
    assert_close(miss(Tensor(x)), x @ (as_array(miss.weight) + b @ a).T + as_array(miss.bias))


def test_gradients_reach_x_and_the_block(mode):
    miss, x, weights = adapted(normal_dense(IN, OUT)).set_train(), normal(4, IN), normal(4, OUT, seed=4)
    of_x, of_block = gradients(miss, x, weights)
    a, b = miss.pair()
    assert_close(of_x, weights @ (as_array(miss.weight) + b @ a))
    assert_close(of_block, weights.T @ shards(x, RANK))


def test_dropout_is_on_the_low_rank_path():
    miss = adapted(nn.Dense(1, 4, has_bias=False), rank=1, lora_dropout=0.5).set_train()
    x = np.ones((30, 1), np.float32)
    base = x @ as_array(miss.weight).T
    either = [base[0], base[0] + 2 * (oracle(miss, x) - base)[0]]  # The dropped x is 0 or 2.
    outputs = miss(Tensor(x)).asnumpy()
    hits = [np.abs(outputs - row).max(axis=1) < 1e-5 for row in either]
    assert (hits[0] | hits[1]).all() and hits[0].any() and hits[1].any()
    assert_close(miss.set_train(False)(Tensor(x)), oracle(miss, x))


def test_only_blocks_train():
    network = model()
    freeze_base(network)
    assert {p.name.rpartition(".")[2] for p in network.trainable_params()} == {"mindpet_delta_lora_miss_block"}
    cells = dict(lora_cells(network))
    count = sum(cell.out_channels * 4 for cell in cells.values())
    assert f"trainable params: {count:,} ||" in trainable_summary(network)


def test_merged_and_unmerged():
    network = model()
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed=3)
    before, x = snapshot(network), Tensor(normal(3, 6))
    expected = network(x).asnumpy()
    merge_lora(network)
    assert_close(network(x), expected)
    unmerge_lora(network)
    assert snapshot(network) == before
    merge_and_unload(network)
    assert_close(network(x), expected)


@pytest.mark.parametrize("form, name", [("peft", "folder"), ("mindformers", "a.safetensors"), ("ckpt", "a.ckpt")])
def test_files_are_loaded_again(form, name, tmp_path):
    network, path = model(), str(tmp_path / name)
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed=3)
    save_lora(network, path, form)
    for config in (None, CONFIG):
        again = model(config)
        load_lora(again, path)
        for (_, one), (_, two) in zip(lora_cells(network), lora_cells(again)):
            assert type(two) is MiSSDense
            np.testing.assert_array_equal(as_array(one.lora_parameters()[0]), as_array(two.lora_parameters()[0]))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lora_alpha": 3}, "use_miss is True and lora_alpha is 3: MiSS has no scale. Leave lora_alpha out."),
        ({"use_rslora": True}, "use_miss is True and use_rslora is True, which MiSS does not have."),
        ({"rank_pattern": {"wq": 2}}, "use_miss is True and rank_pattern is {'wq': 2}, which MiSS does not have."),
        ({"use_dora": True}, "use_miss is True and use_dora is True, which MiSS does not have."),
    ],
)
def test_settings_that_it_does_not_have(fields, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig(lora_rank=2, use_miss=True, **fields)
    assert str(error.value).startswith(message)


def test_cells_that_are_not_linear_are_refused():
    network = nn.SequentialCell(nn.Embedding(8, 4))
    with pytest.raises(UnsupportedCellError, match="0: use_miss is not supported on embeddings: its shards are those"):
        apply_lora(network, LoraConfig(use_miss=True, target_modules=["0"]))
