"""merge_lora, unmerge_lora and merge_and_unload: merged weights against numpy, and networks before and after."""

import copy
import logging
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense, LoraError, apply_lora, freeze_base
from mindlora.errors import MergeError
from mindlora.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.nn.tree import lora_cells
from tests.support.networks import (
    TinyModel,
    WeightedSum,
    as_array,
    assert_close,
    lora_forward,
    normal,
    randomize,
    snapshot,
)

DTYPES = ["float32", "float16", "bfloat16"]
CONFIG = LoraConfig(lora_rank=3, lora_alpha=4.5, target_modules=".*")  # scale 1.5


class Pair(nn.Cell):
    """Two linear cells of odd sizes."""

    def __init__(self, **dense):
        super().__init__()
        self.first = nn.Dense(7, 5, has_bias=False, **dense)
        self.second = nn.Dense(5, 3, **dense)

    def construct(self, x):
        return self.second(self.first(x))


def adapted(network, config=CONFIG, seed=1):
    """Puts LoRA on ``network`` and gives every parameter a value; W is larger than the update, as in a model."""
    apply_lora(network, config)
    freeze_base(network)
    randomize(network.get_parameters(), seed)
    for _, cell in lora_cells(network):
        for parameter in cell.lora_parameters():
            parameter.set_data(Tensor(as_array(parameter).astype(np.float32) / 4, parameter.dtype))
    return network


def folded(cell, scale=1.5):
    """The oracle: W + scale B A, in float64."""
    a, b = cell.lora_parameters()
    return as_array(cell.weight) + scale * as_array(b) @ as_array(a)


def pair_forward(network, x, first, second):
    """What a Pair computes with the given weights, in float64."""
    return x @ first.T @ second.T + as_array(network.second.bias)


def refused(call, network, message, *probe, kind=MergeError):
    """Asserts that ``call`` raises, with these very words or what they match, and leaves every byte as it was."""
    before, merged = snapshot(network), [cell.merged for _, cell in lora_cells(network)]
    with pytest.raises(kind) as error:
        call(network, *probe)
    assert message.match(str(error.value)) if isinstance(message, re.Pattern) else message == str(error.value)
    assert snapshot(network) == before and [cell.merged for _, cell in lora_cells(network)] == merged


@pytest.mark.parametrize("adapter_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_merged_weight_is_the_rounded_sum_and_unmerging_restores_every_byte(dtype, adapter_dtype):
    network = adapted(
        Pair(dtype=getattr(ms, dtype)),
        LoraConfig(lora_rank=3, lora_alpha=4.5, target_modules=".*", param_init_type=adapter_dtype),
    )
    odd = network.first.weight.asnumpy().copy()
    odd[0, :2] = -0.0, 2.0**-24  # minus zero, and float16's smallest number
    network.first.weight.set_data(Tensor(odd))
    before, expected = snapshot(network), [folded(cell) for _, cell in lora_cells(network)]
    report = merge_lora(network)
    unit = 2.0 ** -{"float32": 23, "float16": 11, "bfloat16": 8}[dtype]
    for (_, cell), weight in zip(lora_cells(network), expected):
        assert cell.merged and cell.weight.dtype == getattr(ms, dtype)
        np.testing.assert_allclose(as_array(cell.weight), weight, rtol=1.01 * unit, atol=1e-6)  # rounded to nearest
        assert not as_array(cell.mindpet_delta_lora_b).any() and as_array(cell.mindpet_delta_lora_a).any()
    largest = max(np.abs(weight).sum(1).max() for weight in expected)
    assert 0 < report.difference <= report.bound < 16 * unit * largest  # which is worth something
    unmerge_lora(network)
    assert snapshot(network) == before and not network.first.merged and not network.second.merged


@pytest.mark.parametrize(
    "keys, first, second",
    [
        ({}, 1.5, 1.5),
        ({"use_rslora": True}, 3.0, 3.0),
        ({"rank_pattern": {"second": 2}, "alpha_pattern": {"second": 1}}, 1.5, 0.5),
    ],
)
def test_the_scale_is_each_cell_s_own(keys, first, second):
    network = adapted(Pair(), LoraConfig(lora_rank=4, lora_alpha=6, target_modules=".*", **keys))
    expected = {network.first: folded(network.first, first), network.second: folded(network.second, second)}
    merge_lora(network)
    for cell, weight in expected.items():
        assert_close(cell.weight, weight)


def test_a_weight_of_several_blocks_is_merged_whole():
    cell = LoRADense(1100, 1201, 2, 4, has_bias=False)  # more than 2^20 elements, and no whole number of blocks
    randomize(cell.get_parameters())
    expected = folded(cell, 2.0)
    assert merge_lora(cell).merged == ("LoRADense",)
    assert_close(cell.weight, expected)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_a_network_that_ran_before_is_right_merged_and_unmerged_again(mode, frozen, outside):
    network = adapted(Pair())
    for parameter in network.get_parameters():
        parameter.requires_grad = not frozen and parameter.requires_grad
    runs, x = nn.SequentialCell(network) if outside else network, normal(4, 7)
    expected = pair_forward(network, x, folded(network.first), folded(network.second))
    before = runs(Tensor(x)).asnumpy()
    for _ in range(2):
        merge_lora(network)
        assert_close(runs(Tensor(x)), expected)
        unmerge_lora(network)
        np.testing.assert_array_equal(runs(Tensor(x)).asnumpy(), before)
    # Later values of A and B count from the base again, and not from what was merged.
    randomize([network.first.mindpet_delta_lora_b], seed=8)
    assert_close(runs(Tensor(x)), pair_forward(network, x, folded(network.first), folded(network.second)))


def test_a_network_that_trained_before_is_right_merged_and_trains_again_unmerged(mode):
    network = adapted(Pair(), LoraConfig(lora_rank=3, lora_alpha=4.5, lora_dropout=0.2, target_modules=".*"))
    x = normal(4, 7)
    expected = pair_forward(network, x, folded(network.first), folded(network.second))
    gradient = ms.grad(WeightedSum(network), None, [network.first.mindpet_delta_lora_b])
    inputs = Tensor(x), Tensor(normal(4, 3))
    first = gradient(*inputs)[0].asnumpy()  # in evaluation mode, so that nothing is dropped
    network.set_train()(Tensor(x))
    network.set_train(False)
    merge_lora(network)
    assert_close(network(Tensor(x)), expected)
    unmerge_lora(network)
    np.testing.assert_array_equal(gradient(*inputs)[0].asnumpy(), first)


def test_a_copy_of_a_merged_network_is_unmerged_by_itself():
    network = adapted(Pair())
    before = snapshot(network)
    merge_lora(network)
    twin = copy.deepcopy(network)
    unmerge_lora(network)
    assert twin.first.merged and snapshot(twin) != before
    unmerge_lora(twin)
    assert snapshot(twin) == snapshot(network) == before


NOT_FINITE = "1: W, A or B holds NaN or infinity, so that nothing was merged."


@pytest.mark.parametrize(
    "dtype, name, value, message",
    [
        ("bfloat16", "weight", np.nan, NOT_FINITE),
        ("float32", "mindpet_delta_lora_a", np.nan, NOT_FINITE),
        ("float32", "mindpet_delta_lora_b", np.inf, NOT_FINITE),
        (
            "float16",
            "mindpet_delta_lora_b",
            1e6,
            "1: on a random probe the merged cell's result differs by nan, and "
            r"rounding to float16 explains no more than [0-9.e+]+\. The merge is undone: keep the adapter unmerged, or load",
        ),
    ],
)
def test_what_leaves_the_range_of_the_weight_is_undone(dtype, name, value, message):
    network = adapted(nn.CellList([nn.Dense(7, 5), nn.Dense(60, 3, dtype=getattr(ms, dtype))]))
    array = getattr(network[1], name).asnumpy().copy()
    array[0, 0] = value
    getattr(network[1], name).set_data(Tensor(array))
    for call in (merge_lora, merge_and_unload):
        refused(call, network, re.compile(message))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_update_that_does_not_arrive_in_the_weight_is_noticed(monkeypatch, dtype):
    cell = LoRADense(600, 5, 2, 2, has_bias=False, dtype=getattr(ms, dtype))
    randomize(cell.get_parameters())
    b = {"float32": 1.6e-7, "float16": 6.4e-4, "bfloat16": 5.2e-3}[dtype] * normal(5, 2)  # elements of W are about 1
    cell.mindpet_delta_lora_b.set_data(Tensor(b))
    monkeypatch.setattr(cell.weight, "set_data", lambda data: None)
    refused(merge_lora, cell, re.compile(f"LoRADense: .* differs by [0-9.e-]+, and rounding to {dtype}"))


class Answering(Pair):
    """Answers with ``answer`` while merged, as a graph with the weight as a constant in it would."""

    def __call__(self, x):
        return self.answer if self.first.merged else self.construct(x), x


@pytest.mark.parametrize("change", [1, 0.01, np.nan])
def test_an_output_that_changes_is_undone(change):
    network, x = adapted(Answering()), Tensor(normal(2, 7))
    network.answer = network(x)[0] + change
    allowed = 1e-3 * np.abs(network(x)[0].asnumpy()).max()
    refused(
        merge_lora,
        network,
        f"Merged, the network's output on the given probe differs by {change}, and rounding "
        f"explains about {allowed:.3g}. The merge is undone: keep the adapter unmerged, or leave the probe out if "
        "the output is random by itself.",
        x,
    )


class Masking(Pair):
    """A Pair with minus infinity in one place of its first output."""

    def construct(self, x):
        return super().construct(x) + Tensor([0, float("-inf"), 0], ms.float32), x


def test_outputs_are_compared_where_infinities_mask(mode):
    network, x = adapted(Masking()), Tensor(normal(2, 7))
    report = merge_lora(network, x)
    finite = np.abs(network(x)[0].asnumpy()[:, ::2]).max()
    assert report.output_difference <= report.output_bound == pytest.approx(1e-3 * finite, rel=1e-3)


@pytest.mark.parametrize("call", [merge_lora, merge_and_unload])
def test_what_cannot_be_merged_is_refused(call):
    refused(
        call,
        Pair(),
        "The network holds no LoRADense cell, so there is no adapter to merge or unmerge. Call "
        "apply_lora, and load_lora, first.",
        kind=LoraError,
    )
    refused(
        call,
        adapted(Pair()).set_train(),
        "The network is in training mode, at first, second: call network.set_train(False) before merging.",
    )
    refused(
        call,
        nn.CellList([LoRADense(3, 2, 1, 1, dtype=ms.float64)]),
        "The weight of 0 is Float64: an adapter can be merged into float32, float16 or bfloat16.",
    )


def test_a_lone_cell_is_not_unloaded():
    refused(
        merge_and_unload,
        LoRADense(5, 3, 2, 4),
        "The network is itself a LoRADense, so no cell is around it to "
        "put the plain one into. Use merge_lora, or put it into a network.",
    )


def test_merging_twice_and_unmerging_twice_are_refused():
    network = adapted(Pair())
    for _ in range(2):
        refused(
            unmerge_lora, network, "No adapter of the network is merged, so there is nothing to take out of the base."
        )
        merge_lora(network)
        for call in (merge_lora, merge_and_unload):
            refused(call, network, "Adapters are merged already, at first, second: call unmerge_lora first.")
        unmerge_lora(network)
    merge_lora(network.first)
    refused(merge_lora, network, "Adapters are merged already, at first: call unmerge_lora first.")
    unmerge_lora(network)  # what is merged of it


def test_training_while_merged_is_refused():
    network = adapted(Pair())
    merge_lora(network)
    step = nn.TrainOneStepCell(WeightedSum(network), nn.SGD(network.trainable_params()))
    for cell, path in ((network, "first"), (network.second, "second"), (step, "first")):
        with pytest.raises(MergeError) as error:
            cell.set_train()
        assert str(error.value) == (
            f"{path} is merged into its base and cannot train: call unmerge_lora first, or "
            "set_train(False) to go on without training."
        )
        assert not network.first.training and not network.second.training
    network.set_train(False)
    unmerge_lora(network)
    assert network.set_train(True).second.training


def test_training_that_went_unnoticed_is_warned_of(caplog):
    network = adapted(Pair())
    before = snapshot(network)
    merge_lora(network)
    randomize([network.second.mindpet_delta_lora_b])
    with caplog.at_level(logging.WARNING, "mindlora"):
        unmerge_lora(network)
    assert [record.getMessage() for record in caplog.records] == [
        "The adapter was changed while it was merged, at second, by training or by loading: that is lost, for "
        "unmerge_lora restores what was before the merge."
    ]
    assert snapshot(network) == before


@pytest.mark.parametrize("call", [merge_lora, merge_and_unload])
def test_a_weight_that_another_cell_uses_is_refused(make_llama, call):
    llama, network = make_llama(tie_word_embeddings=True), nn.CellList([nn.Dense(6, 6), nn.Dense(6, 6)])
    apply_lora(llama, LoraConfig(target_modules=".*wq|lm_head"))
    refused(
        call,
        llama,
        "lm_head shares its weight with model.tok_embeddings (embedding_weight), which merging would "
        "change too. Keep the adapter unmerged, or untie the two before apply_lora.",
    )
    network[1].weight = network[0].weight
    apply_lora(network, CONFIG)
    refused(call, network, re.compile(r"[01] shares its weight with [01] \(weight\), which merging"))


def test_an_output_that_is_no_tensor_and_a_weight_without_values_are_refused(monkeypatch):
    network = adapted(Answering())
    monkeypatch.setattr(Answering, "__call__", lambda self, x: (5, x))
    refused(
        merge_lora,
        network,
        "The network's first output on the probe is of type int: only a Tensor can be "
        "compared before and after merging.",
        0,
    )
    monkeypatch.setattr(type(network.first.weight), "has_init", True)
    with pytest.raises(MergeError, match="^The weight of first has no values yet: load the base checkpoint before mer"):
        merge_lora(network)


class OtherDense(nn.Dense):
    """A class of its own with nn.Dense's forward."""


def test_unloading_brings_the_plain_cells_back(mode, tmp_path):
    network = Pair()
    network.second = OtherDense(5, 3, activation="relu")
    plain = {path: (type(cell), repr(cell)) for path, cell in network.cells_and_names()}
    names = [p.name for p in network.get_parameters()]
    adapted(network)
    # The plain cells that the adapters keep are seen nowhere until then.
    assert not any(isinstance(cell, nn.Dense) for _, cell in network.cells_and_names())
    ms.save_checkpoint(network, str(tmp_path / "all.ckpt"))
    assert len(ms.load_checkpoint(str(tmp_path / "all.ckpt"))) == len(list(network.get_parameters())) == len(names) + 4
    x, cell, weights = normal(4, 7), network.first, [folded(network.first), folded(network.second)]
    expected = np.maximum(pair_forward(network, x, *weights), 0)
    assert_close(network(Tensor(x)), expected)
    report = merge_and_unload(network, Tensor(x))
    assert {path: (type(cell), repr(cell)) for path, cell in network.cells_and_names()} == plain
    assert [p.name for p in network.get_parameters()] == names
    assert report.merged == ("first", "second") and report.output_difference is not None
    assert report.before_merge_bytes == 0 and cell.before_merge is None  # which would hold the memory of another base
    assert_close(network(Tensor(x)), expected)
    network.set_train()
    apply_lora(network, CONFIG)  # and anew


class Shared(nn.Cell):
    """One linear cell in three places, one of them the list of a SequentialCell, and another one."""

    def __init__(self):
        super().__init__()
        self.again = nn.Dense(6, 6)
        self.sequence, self.list = nn.SequentialCell(self.again, nn.ReLU()), nn.CellList([self.again, nn.Dense(6, 6)])

    def construct(self, x):
        return self.again(self.list[1](self.list[0](self.sequence(x))))


def test_sequences_lists_and_shared_cells_are_unloaded(mode):
    network = adapted(Shared())
    y = x = normal(2, 6)
    for step, cell in enumerate([network.again, network.again, network.list[1], network.again]):
        y = y @ folded(cell).T + as_array(cell.bias)
        y = np.maximum(y, 0) if step == 0 else y
    assert_close(network(Tensor(x)), y)
    assert len(merge_and_unload(network).merged) == 2
    assert network.again is network.sequence[0] is network.list[0] is network.sequence.cell_list[0]
    assert isinstance(network.again, nn.Dense) and isinstance(network.list[1], nn.Dense)
    assert_close(network(Tensor(x)), y)


def test_what_changed_after_apply_lora_is_the_plain_cell_s_too():
    network, other = adapted(Pair()), nn.Dense(7, 5)
    network.first.weight = other.weight
    network.first.recompute()
    network.second.pipeline_stage = 1
    merge_and_unload(network)
    assert network.first.weight is other.weight and network.first.get_scope() == "recompute_"
    assert network.second.pipeline_stage == 1


@pytest.mark.parametrize("call, kind", [(merge_lora, "LoRADense"), (merge_and_unload, "Linear")])
def test_the_update_goes_before_the_activation_of_a_linear_cell(mode, mindformers, call, kind):
    linear = mindformers.modules.layers.Linear(7, 5, activation="silu", compute_dtype=ms.float32)
    network, x = adapted(nn.SequentialCell(linear)), normal(4, 7)
    weight, (a, b) = folded(network[0]), (as_array(p) for p in network[0].lora_parameters())
    expected = lora_forward(x, as_array(linear.weight), a, b, 1.5, as_array(linear.bias))
    expected = expected / (1 + np.exp(-expected))
    assert_close(network(Tensor(x)), expected)
    call(network)
    assert type(network[0]).__name__ == kind
    assert_close(network[0].weight, weight)
    assert_close(network(Tensor(x)), expected)


def test_a_llama_is_merged_unmerged_and_unloaded(mode, make_llama):
    network = make_llama()
    plain = [(p.name, p.shape) for p in network.get_parameters()]
    kinds = {path: type(cell) for path, cell in network.cells_and_names()}
    apply_lora(network, LoraConfig(lora_rank=4, lora_alpha=8, target_modules="all-linear"))
    randomize([cell.mindpet_delta_lora_b for _, cell in lora_cells(network)])
    network.set_train(False)
    tokens, before = Tensor(np.arange(16, dtype=np.int32)[None]), snapshot(network)
    logits = network(tokens)[0].asnumpy()
    report = merge_lora(network, tokens)
    assert len(report.merged) == 14 and report.output_difference < 1e-4
    np.testing.assert_allclose(network(tokens)[0].asnumpy(), logits, rtol=0, atol=1e-4 * np.abs(logits).max())
    unmerge_lora(network)
    np.testing.assert_array_equal(network(tokens)[0].asnumpy(), logits)
    assert snapshot(network) == before
    merge_and_unload(network, tokens)
    assert [(p.name, p.shape) for p in network.get_parameters()] == plain
    assert {path: type(cell) for path, cell in network.cells_and_names()} == kinds
    np.testing.assert_allclose(network(tokens)[0].asnumpy(), logits, rtol=0, atol=1e-4 * np.abs(logits).max())


def test_the_report_says_what_was_merged_and_how_well(caplog):
    network = adapted(TinyModel())
    with caplog.at_level(logging.INFO, "mindlora"):
        report = merge_lora(network, Tensor(normal(2, 6)))
    assert report.before_merge_bytes == sum(
        weight.nbytes + b.nbytes for weight, b in (c.before_merge for _, c in lora_cells(network))
    )
    assert report.cell in report.merged and len(report.merged) == 15
    number = r"[0-9.]+(e-[0-9]+)?"
    assert re.fullmatch(
        rf"""Adapters merged into the base: 15, at model\.layers\..*lm_head\.
Largest difference of a cell's result on a random probe: {number}, at {report.cell}; rounding explains up to {number}\.
Largest difference of the network's output on the given probe: {number}; allowed are {number}\.
Kept on the host for unmerge_lora: 0\.0 MiB\.""",
        str(report),
    )
    assert caplog.records[-1].getMessage() == str(report)
    unmerge_lora(network)
    assert len(str(merge_and_unload(network)).splitlines()) == 2
