"""apply_lora, freeze_base and trainable_summary on networks of nn.Dense and on MindFormers' Llama."""
import logging
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoRADense, LoraConfig, LoraError, apply_lora, freeze_base, trainable_summary
from mindlora.errors import TargetError, UnsupportedCellError
from tests.helpers import (TinyModel, WeightedSum, adapters, as_array, assert_close, lora_forward, randomize,
                           snapshot)

X = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
ATTENTION = ["wq", "wk", "wv", "wo"]


def on(network, target_modules="all-linear", **fields):
    """Puts LoRA on a network and gives A and B normal values."""
    report = apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=target_modules, **fields))
    randomize(adapters(network).values())
    return report


def delta(cell):
    """Returns scale B A of a LoRADense."""
    a, b = (as_array(p) for p in cell.lora_parameters())
    return cell.lora_alpha / cell.lora_rank * b @ a


# The report and what is where -----------------------------------------------------------------------------------

def test_the_report_has_the_paths_and_the_numbers():
    network = TinyModel()
    before = sum(math.prod(p.shape) for p in network.get_parameters())
    report = on(network, ["wq", "wk", "lm_head"])
    assert report.replaced == ("model.layers.0.attention.wq", "model.layers.0.attention.wk",
                               "model.layers.1.attention.wq", "model.layers.1.attention.wk", "lm_head")
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
        "lm_head.mindpet_delta_lora_a", "lm_head.mindpet_delta_lora_b",
        "model.layers.0.attention.wq.mindpet_delta_lora_a", "model.layers.0.attention.wq.mindpet_delta_lora_b"]
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
    apply_lora(network, LoraConfig(lora_rank=5, lora_alpha=7, lora_dropout=0.1, target_modules=ATTENTION,
                                   exclude_modules=["wk"], param_init_type="float16", lora_b_init="ones"))
    cells = [cell for _, cell in network.cells_and_names() if isinstance(cell, LoRADense)]
    assert len(cells) == 3
    for cell in cells:
        assert (cell.lora_rank, cell.lora_alpha, cell.dropout_rate) == (5, 7, 0.1)
        a, b = cell.lora_parameters()
        assert a.dtype == b.dtype == ms.float16 and (as_array(b) == 1).all()


# The forward ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("target_modules", [["lm_head"], ["wo"], "all-linear"], ids=str)
def test_the_network_computes_as_with_merged_weights(mode, target_modules):
    network, merged = TinyModel(), TinyModel()
    randomize(network.get_parameters(), seed=1)
    randomize(merged.get_parameters(), seed=1)
    np.testing.assert_array_equal(network(Tensor(X)).asnumpy(), merged(Tensor(X)).asnumpy())
    before = network(Tensor(X)).asnumpy()
    on(network, target_modules)
    cells = dict(merged.cells_and_names())
    for path, cell in network.cells_and_names():
        if isinstance(cell, LoRADense):
            cells[path].weight.set_data(Tensor((as_array(cell.weight) + delta(cell)).astype(np.float32)))
    after = network(Tensor(X)).asnumpy()
    np.testing.assert_allclose(after, merged(Tensor(X)).asnumpy(), rtol=1e-3, atol=1e-3 * np.abs(after).max())
    assert np.abs(after - before).max() > 0.01 * np.abs(before).max()


def test_a_network_that_was_compiled_before_runs_with_lora(mode):
    network = nn.SequentialCell(nn.Dense(6, 5), nn.ReLU())
    before = network(Tensor(X)).asnumpy()
    on(network)
    cell = network[0]
    assert_close(network(Tensor(X)), np.maximum(lora_forward(X, as_array(cell.weight), *map(
        as_array, cell.lora_parameters()), 1.5, as_array(cell.bias)), 0))
    assert (network(Tensor(X)).asnumpy() != before).any()


def test_sequential_cell(mode):
    network = nn.SequentialCell(nn.Dense(6, 5, has_bias=False), nn.Dense(5, 4, has_bias=False))
    assert on(network, ["1"]).replaced == ("1",)
    first, second = network[0], network[1]
    assert isinstance(second, LoRADense) and not isinstance(first, LoRADense)
    assert_close(network(Tensor(X)), lora_forward(X @ as_array(first.weight).T, as_array(second.weight), *map(
        as_array, second.lora_parameters()), 1.5))


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
    """One linear cell in two places, as tied weights are."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(6, 6, has_bias=False)
        self.inner = nn.SequentialCell(self.first)

    def construct(self, x):
        return self.inner(self.first(x))


def test_a_cell_in_two_places_is_one_adapter_in_both(mode):
    network = Shared()
    report = on(network)
    assert network.first is network.inner[0] is network.inner.cell_list[0]
    assert isinstance(network.first, LoRADense)
    assert report.replaced == ("first",) and report.trainable == 2 * 12 and len(adapters(network)) == 2
    weights = [as_array(network.first.weight), *map(as_array, network.first.lora_parameters()), 1.5]
    assert_close(network(Tensor(X)), lora_forward(lora_forward(X, *weights), *weights))


# Errors ---------------------------------------------------------------------------------------------------------

def test_applied_twice_it_is_an_error_and_nothing_is_reset():
    network = TinyModel()
    on(network, ["wq"])
    before = snapshot(network)
    with pytest.raises(LoraError) as error:
        on(network, ["wk"])
    assert str(error.value) == ("LoRA is on this network already, at model.layers.{0..1}.attention.wq. Applying it "
                                "again would reset what was trained; build the network anew instead.")
    assert snapshot(network) == before


@pytest.mark.parametrize("target_modules, message", [
    ("query", "target_modules 'query' matches no linear cell. Linear cells of this network: "
              "model.layers.{0..1}.attention.wq, "),
    (["attention"], "'attention' does match model.layers.0.attention, but that is a Attention and not a linear cell."),
    (["attention_norm"], "'attention_norm' does match model.layers.0.attention_norm, but that is a LayerNorm"),
    (None, "target_modules is missing")])
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
    network = nn.SequentialCell(nn.Dense(6, 6), OtherForward(6, 6),
                                mindformers.modules.layers.Linear(6, 6, transpose_b=False), nn.Dense(6, 6))
    before = dict(network.cells_and_names())
    with pytest.raises(UnsupportedCellError) as error:
        on(network)
    assert str(error.value) == (
        "LoRA cannot be put on 2 of the selected cells. 1: OtherForward has a forward of its own, which LoRADense "
        "would drop.; 2: Linear keeps its weight as [in_channels, out_channels] (transpose_b False); LoRADense needs "
        "[out_channels, in_channels]. Add it to exclude_modules.")
    assert dict(network.cells_and_names()) == before
    assert on(network, exclude_modules=["1", "2"]).replaced == ("0", "3")


# MindFormers' Llama ---------------------------------------------------------------------------------------------

TOKENS = np.random.default_rng(0).integers(1, 64, size=(1, 16)).astype(np.int32)


def logits(network):
    return network.set_train(False)(Tensor(TOKENS))[0].asnumpy()


def llama_with_and_without(make_llama, target_modules, **keys):
    """Returns a Llama with LoRA, and one whose weights are the merged ones."""
    network, merged = make_llama(**keys), make_llama(**keys)
    weights = {p.name: p.value() for p in network.get_parameters()}
    for parameter in merged.get_parameters():
        parameter.set_data(weights[parameter.name])
    on(network, target_modules)
    for parameter in adapters(network).values():
        parameter.set_data(parameter * 0.1)
    cells = dict(merged.cells_and_names())
    for path, cell in network.cells_and_names():
        if isinstance(cell, LoRADense):
            cells[path].weight.set_data(Tensor((as_array(cell.weight) + delta(cell)).astype(np.float32)))
    return network, merged


def test_llama_in_graph_mode_computes_as_with_merged_weights(make_llama):
    network, merged = llama_with_and_without(make_llama, "all-linear")
    assert len(adapters(network)) == 2 * 2 * 7
    np.testing.assert_allclose(logits(network), logits(merged), rtol=0, atol=1e-4 * np.abs(logits(merged)).max())
    assert "model.layers.0.feed_forward.w1.mindpet_delta_lora_a" in adapters(network)


@pytest.mark.parametrize("target_modules, replaced", [
    (".*wq|.*wk|.*wv|.*wo", ["attention.w_qkv", "attention.wo"]),
    (["w_gate_hidden"], ["feed_forward.w_gate_hidden"]),
    ("all-linear", ["attention.w_qkv", "attention.wo", "feed_forward.w_gate_hidden", "feed_forward.w2"])])
def test_llama_with_qkv_concat(make_llama, target_modules, replaced):
    network = make_llama(qkv_concat=True)
    assert on(network, target_modules).replaced == tuple(
        f"model.layers.{i}.{leaf}" for i in range(2) for leaf in replaced)
    assert all(p.shape[0] == 2 for name, p in adapters(network).items() if name.endswith("_a"))


def test_llama_with_qkv_concat_computes_as_with_merged_weights(make_llama):
    if ms.__version__ < "2.9":
        pytest.skip("SplitWithSize, which qkv_concat needs, has no CPU kernel before MindSpore 2.9")
    network, merged = llama_with_and_without(make_llama, "all-linear", qkv_concat=True)
    np.testing.assert_allclose(logits(network), logits(merged), rtol=0, atol=1e-4 * np.abs(logits(merged)).max())


def test_llama_with_qkv_concat_and_a_part_of_it_selected(make_llama):
    with pytest.raises(TargetError) as error:
        on(make_llama(qkv_concat=True), ["wq", "wv"])
    assert str(error.value) == (
        "target_modules names wq, wv, but here model.layers.0.attention.w_qkv holds wq, wk, wv in one cell. "
        "Name w_qkv, or wk as well, or build the model with qkv_concat: False.")


def test_a_parent_cell_of_llama_is_said_to_be_one(make_llama):
    with pytest.raises(TargetError, match="'feed_forward' does match model.layers.0.feed_forward, but that is a "
                                          "LlamaFeedForward and not a linear cell."):
        on(make_llama(), ["feed_forward"])


# Freezing -------------------------------------------------------------------------------------------------------

def trainable(network):
    return [p.name for p in network.get_parameters() if p.requires_grad]


@pytest.mark.parametrize("config", [None, LoraConfig()])
def test_freeze_base_leaves_a_and_b_alone_to_train(config):
    network = TinyModel()
    on(network, ["wq", "lm_head"])
    freeze_base(network, config)
    assert trainable(network) == list(adapters(network))
    assert [p.name for p in network.trainable_params()] == list(adapters(network))


def test_frozen_parameters_keep_dtype_and_bytes():
    network = TinyModel()
    on(network)
    network.model.layers[0].to_float(ms.float16)
    before = {p.name: (p.dtype, p.asnumpy().tobytes()) for p in network.get_parameters()}
    freeze_base(network)
    assert {p.name: (p.dtype, p.asnumpy().tobytes()) for p in network.get_parameters()} == before


def test_freeze_exclude_trains_base_parameters_too_and_says_so(caplog):
    network = TinyModel()
    on(network, ["wq"])
    with caplog.at_level(logging.WARNING, "mindlora"):
        freeze_base(network, LoraConfig(freeze_exclude=["*attention_norm.*", "lm_head.weight"]))
    norms = [f"model.layers.{i}.attention_norm.{half}" for i in range(2) for half in ("beta", "gamma")]
    assert sorted(set(trainable(network)) - set(adapters(network))) == ["lm_head.weight"] + norms
    assert set(adapters(network)) < set(trainable(network))
    assert [record.getMessage() for record in caplog.records] == [
        "Training 5 base parameters besides LoRA (freeze_exclude): lm_head.weight, "
        "model.layers.{0..1}.attention_norm.beta, model.layers.{0..1}.attention_norm.gamma. A saved adapter holds "
        "LoRA tensors and the modules of modules_to_save alone, so name these there, or keep them with "
        "mindspore.save_checkpoint."]


def test_freeze_include_freezes_adapters_too():
    network = TinyModel()
    on(network, ["wq"])
    freeze_base(network, LoraConfig(freeze_include=["model.layers.0.*"]))
    assert trainable(network) == [name for name in adapters(network) if name.startswith("model.layers.1.")]


def test_a_parameter_in_both_lists_is_as_without_them():
    network = TinyModel()
    on(network, ["wq"])
    freeze_base(network, LoraConfig(freeze_include=["*layers.0*"], freeze_exclude=["*layers.0*", "lm_head.weight"]))
    assert set(trainable(network)) == {*adapters(network), "lm_head.weight"}


def test_patterns_are_shell_style_and_case_sensitive_on_full_names():
    network = TinyModel()
    on(network, ["wq"])
    freeze_base(network, LoraConfig(freeze_exclude=["model.layers.?.attention.w[kv].weight"]))
    assert len(trainable(network)) == 4 + 4
    for pattern in ("layers.0.*", "LM_HEAD.weight", "lm_head"):
        with pytest.raises(TargetError):
            freeze_base(network, LoraConfig(freeze_exclude=[pattern]))


@pytest.mark.parametrize("field", ["freeze_include", "freeze_exclude"])
def test_a_pattern_without_a_match_is_an_error_that_lists_the_parameters(field):
    network = nn.SequentialCell(nn.Dense(6, 5), nn.Dense(5, 4, has_bias=False))
    on(network, ["0"])
    with pytest.raises(TargetError) as error:
        freeze_base(network, LoraConfig(**{field: ["0.*", "norm*"]}))
    assert str(error.value) == (
        f"{field} pattern 'norm*' matches no parameter. Parameters: {{0..1}}.weight, 0.bias, "
        "0.mindpet_delta_lora_a, 0.mindpet_delta_lora_b.")
    assert all(p.requires_grad for p in network.get_parameters())


def test_freezing_everything_is_an_error():
    network = TinyModel()
    on(network, ["wq"])
    with pytest.raises(TargetError) as error:
        freeze_base(network, LoraConfig(freeze_include=["*"]))
    assert str(error.value) == "freeze_include ['*'] freezes everything: nothing is left to train."


def test_without_adapters_there_is_nothing_to_train():
    network = TinyModel()
    with pytest.raises(LoraError) as error:
        freeze_base(network)
    assert str(error.value) == ("The network holds no LoRADense cell: freezing the base would leave nothing to train. "
                                "Call apply_lora first.")
    assert all(p.requires_grad for p in network.get_parameters())


# Training -------------------------------------------------------------------------------------------------------

def test_twenty_steps_move_a_and_b_and_no_bit_of_the_base(mode):
    network = TinyModel(1)
    apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=4, target_modules=["wq", "w1", "lm_head"]))
    freeze_base(network)
    before = snapshot(network)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=0.01, weight_decay=0.1)
    step = nn.TrainOneStepCell(WeightedSum(network), optimizer).set_train()
    weights = Tensor(np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32))
    for _ in range(20):
        step(Tensor(X), weights)
    after = snapshot(network)
    moved = {name for name in before if before[name] != after[name]}
    assert moved == set(adapters(network))
    states = {p.name for p in optimizer.get_parameters()} - {p.name for p in network.get_parameters()}
    assert {name for name in states if any(base in name for base in set(before) - set(adapters(network)))} == set()
    assert {name.split(".", 1)[1] for name in states if name.startswith("adam_m.")} == set(adapters(network))


def test_frozen_weights_get_no_gradient(mode):
    network = TinyModel(1)
    on(network, ["wq"])
    freeze_base(network)
    names = [p.name for p in network.trainable_params()]
    gradients = ms.grad(WeightedSum(network), None, network.trainable_params())(
        Tensor(X), Tensor(np.ones((3, 8), np.float32)))
    assert names == list(adapters(network)) and len(gradients) == 2
    assert all(np.abs(g.asnumpy()).max() > 0 for g in gradients)


def test_at_the_start_b_moves_first():
    network = nn.SequentialCell(nn.Dense(6, 5))
    apply_lora(network, LoraConfig(lora_rank=2, target_modules="all-linear"))
    of_a, of_b = ms.grad(WeightedSum(network), None, network[0].lora_parameters())(
        Tensor(X), Tensor(np.ones((3, 5), np.float32)))
    assert not of_a.asnumpy().any() and of_b.asnumpy().all()


# The summary ----------------------------------------------------------------------------------------------------

def test_summary_is_a_table_and_the_line_of_peft():
    network = TinyModel()
    on(network, ["wq", "wk", "lm_head"])
    freeze_base(network)
    assert trainable_summary(network) == "\n".join([
        "adapters on                       cells  in x out  rank  alpha  parameters",
        "model.layers.{0..1}.attention.wq      2     6 x 6     2      3          48",
        "model.layers.{0..1}.attention.wk      2     6 x 4     2      3          40",
        "lm_head                               1     6 x 8     2      3          28",
        "trainable params: 116 || all params: 800 || trainable%: 14.5000"])


def test_summary_counts_what_freeze_base_left():
    network = nn.SequentialCell(nn.Dense(1000, 300, has_bias=False))
    apply_lora(network, LoraConfig(lora_rank=4, target_modules="all-linear"))
    assert trainable_summary(network).splitlines()[-1] == (
        "trainable params: 305,200 || all params: 305,200 || trainable%: 100.0000")
    freeze_base(network)
    assert trainable_summary(network).splitlines()[-1] == (
        "trainable params: 5,200 || all params: 305,200 || trainable%: 1.7038")


def test_summary_of_a_network_without_adapters_is_the_last_line_alone():
    assert trainable_summary(nn.Dense(6, 5, has_bias=False)) == (
        "trainable params: 30 || all params: 30 || trainable%: 100.0000")
    assert trainable_summary(nn.ReLU()) == "trainable params: 0 || all params: 0 || trainable%: 0.0000"
