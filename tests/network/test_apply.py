"""apply_lora: which cells it replaces, their names, what the network then computes, and what is refused."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense, LoraError, apply_lora
from mindlora.core.errors import TargetError, UnsupportedCellError
from tests.support.adapted_networks import X, merge_by_hand, on
from tests.support.networks import TinyModel, adapters, as_array, assert_close, lora_forward, randomize, snapshot

ATTENTION = ["wq", "wk", "wv", "wo"]


# The report and the new cells -----------------------------------------------------------------------------------


def test_the_report_has_the_paths_and_the_numbers():
    network = TinyModel()
    before = sum(math.prod(p.shape) for p in network.get_parameters())
    report = on(network, ["wq", "wk", "lm_head"])
    assert report.replaced == (
        "model.layers.0.attention.wq",
        "model.layers.0.attention.wk",
        "model.layers.1.attention.wq",
        "model.layers.1.attention.wk",
        "lm_head",
    )
    assert report.trainable == 2 * (2 * (6 + 6) + 2 * (6 + 4)) + 2 * (6 + 8)
    assert report.total == before + report.trainable


def test_selected_cells_are_lora_dense_and_the_others_are_untouched():
    network = TinyModel()
    before = dict(network.cells_and_names())
    report = on(network, ".*wq|.*w2")
    for path, cell in network.cells_and_names():
        if path in report.replaced:
            assert isinstance(cell, LoRADense) and cell.weight is before[path].weight
        elif not path.startswith(tuple(f"{name}." for name in report.replaced)):
            assert cell is before[path]
    assert isinstance(network.model.layers[0].attention.wq, LoRADense)


def test_new_parameters_have_the_names_of_mindformers_and_the_old_ones_keep_theirs():
    network = TinyModel(1)
    before = [p.name for p in network.get_parameters()]
    on(network, ["wq", "lm_head"])
    after = [p.name for p in network.get_parameters()]
    assert sorted(set(after) - set(before)) == [
        "lm_head.mindpet_delta_lora_a",
        "lm_head.mindpet_delta_lora_b",
        "model.layers.0.attention.wq.mindpet_delta_lora_a",
        "model.layers.0.attention.wq.mindpet_delta_lora_b",
    ]
    assert [name for name in after if name in before] == before
    assert network.parameters_dict().keys() == set(after)


def test_names_follow_a_prefix_that_the_network_has_already():
    network = TinyModel(1)
    network.update_parameters_name("backbone.")
    on(network, ["lm_head"])
    assert list(adapters(network)) == ["backbone.lm_head.mindpet_delta_lora_a", "backbone.lm_head.mindpet_delta_lora_b"]


def test_base_weights_keep_their_bytes():
    network = TinyModel()
    before = snapshot(network)
    on(network)
    after = snapshot(network)
    assert {name: after[name] for name in before} == before


def test_freezing_is_left_to_freeze_base():
    network = TinyModel(1)
    on(network)
    assert all(p.requires_grad for p in network.get_parameters())


def test_the_configuration_reaches_every_cell():
    network = TinyModel(1)
    apply_lora(
        network,
        LoraConfig(
            lora_rank=5,
            lora_alpha=7,
            lora_dropout=0.1,
            target_modules=ATTENTION,
            exclude_modules=["wk"],
            param_init_type="float16",
            lora_b_init="ones",
        ),
    )
    cells = [cell for _, cell in network.cells_and_names() if isinstance(cell, LoRADense)]
    assert len(cells) == 3
    for cell in cells:
        assert (cell.lora_rank, cell.lora_alpha, cell.dropout_rate) == (5, 7, 0.1)
        a, b = cell.lora_parameters()
        assert a.dtype == b.dtype == ms.float16 and (as_array(b) == 1).all()


# The forward ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_modules", [["lm_head"], ["wo"], "all-linear"], ids=str)
def test_the_network_computes_as_with_merged_weights(mode, target_modules):
    network, merged = TinyModel(1), TinyModel(1)
    randomize(network.get_parameters(), seed=1)
    randomize(merged.get_parameters(), seed=1)
    np.testing.assert_array_equal(network(Tensor(X)).asnumpy(), merged(Tensor(X)).asnumpy())
    before = network(Tensor(X)).asnumpy()
    on(network, target_modules)
    merge_by_hand(network, merged)
    after = network(Tensor(X)).asnumpy()
    np.testing.assert_allclose(after, merged(Tensor(X)).asnumpy(), rtol=1e-3, atol=1e-3 * np.abs(after).max())
    assert np.abs(after - before).max() > 0.01 * np.abs(before).max()


def test_a_network_that_was_compiled_before_runs_with_lora(mode):
    network = nn.SequentialCell(nn.Dense(6, 5), nn.ReLU())
    before = network(Tensor(X)).asnumpy()
    on(network)
    cell = network[0]
    assert_close(
        network(Tensor(X)),
        np.maximum(
            lora_forward(X, as_array(cell.weight), *map(as_array, cell.lora_parameters()), 1.5, as_array(cell.bias)), 0
        ),
    )
    assert (network(Tensor(X)).asnumpy() != before).any()


def test_sequential_cell(mode):
    network = nn.SequentialCell(nn.Dense(6, 5, has_bias=False), nn.Dense(5, 4, has_bias=False))
    assert on(network, ["1"]).replaced == ("1",)
    first, second = network[0], network[1]
    assert isinstance(second, LoRADense) and not isinstance(first, LoRADense)
    assert_close(
        network(Tensor(X)),
        lora_forward(
            X @ as_array(first.weight).T, as_array(second.weight), *map(as_array, second.lora_parameters()), 1.5
        ),
    )


class Listed(nn.Cell):
    """Linear cells in a CellList."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([nn.Dense(6, 6, has_bias=False) for _ in range(2)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_cell_list(mode):
    network = Listed()
    assert on(network, "blocks.*").replaced == ("blocks.0", "blocks.1")
    expected = X
    for cell in network.blocks:
        assert isinstance(cell, LoRADense)
        expected = lora_forward(expected, as_array(cell.weight), *map(as_array, cell.lora_parameters()), 1.5)
    assert_close(network(Tensor(X)), expected)


class Shared(nn.Cell):
    """One linear cell under two parents, as tied weights are."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(6, 6, has_bias=False)
        self.inner = nn.SequentialCell(self.first)

    def construct(self, x):
        return self.inner(self.first(x))


def test_a_cell_with_two_parents_is_one_adapter_in_both(mode):
    network = Shared()
    report = on(network)
    assert network.first is network.inner[0] is network.inner.cell_list[0]
    assert isinstance(network.first, LoRADense)
    assert report.replaced == ("first",) and report.trainable == 2 * 12 and len(adapters(network)) == 2
    weights = [as_array(network.first.weight), *map(as_array, network.first.lora_parameters()), 1.5]
    assert_close(network(Tensor(X)), lora_forward(lora_forward(X, *weights), *weights))


# Errors ---------------------------------------------------------------------------------------------------------


def test_applying_twice_is_an_error_and_resets_nothing():
    network = TinyModel()
    on(network, ["wq"])
    before = snapshot(network)
    with pytest.raises(LoraError) as error:
        on(network, ["wk"])
    assert str(error.value) == (
        "LoRA is on this network already, at model.layers.{0..1}.attention.wq. Applying it "
        "again would reset what was trained: build a new network."
    )
    assert snapshot(network) == before


@pytest.mark.parametrize(
    "target_modules, message",
    [
        (
            "query",
            "target_modules 'query' matches no linear cell. Choose from the network's linear cells: "
            "model.layers.{0..1}.attention.wq, ",
        ),
        (
            ["attention"],
            "'attention' does match model.layers.0.attention, but that is a Attention and not a linear cell.",
        ),
        (["attention_norm"], "'attention_norm' does match model.layers.0.attention_norm, but that is a LayerNorm"),
        (None, "target_modules is missing"),
    ],
)
def test_no_match_leaves_the_network_as_it_was(target_modules, message):
    network = TinyModel()
    before = dict(network.cells_and_names())
    with pytest.raises(TargetError) as error:
        on(network, target_modules)
    assert message in str(error.value)
    assert dict(network.cells_and_names()) == before


def test_a_network_without_linear_cells_is_an_error():
    with pytest.raises(TargetError, match="The network holds no linear cell"):
        on(nn.SequentialCell(nn.Conv2d(3, 4, 3), nn.ReLU()))


class OtherForward(nn.Dense):
    """A linear cell whose forward is not nn.Dense's."""

    def construct(self, x):
        return 2 * super().construct(x)


def test_all_unsupported_cells_are_listed_and_nothing_is_replaced(mindformers):
    network = nn.SequentialCell(
        nn.Dense(6, 6), OtherForward(6, 6), mindformers.modules.layers.Linear(6, 6, transpose_b=False), nn.Dense(6, 6)
    )
    before = dict(network.cells_and_names())
    with pytest.raises(UnsupportedCellError) as error:
        on(network)
    assert str(error.value) == (
        "LoRA cannot be put on 2 of the selected cells. 1: OtherForward has a forward of its own, which LoRADense "
        "would drop. Add it to exclude_modules.; 2: Linear keeps its weight as [in_channels, out_channels] "
        "(transpose_b False); LoRADense needs [out_channels, in_channels]. Add it to exclude_modules."
    )
    assert dict(network.cells_and_names()) == before
    assert on(network, exclude_modules=["1", "2"]).replaced == ("0", "3")
