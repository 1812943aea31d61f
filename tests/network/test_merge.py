"""merge_lora and unmerge_lora: merged weights against numpy, and networks before and after."""

import copy
import logging
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.tree import lora_cells
from tests.support.merged_networks import Pair, adapted, folded, pair_forward
from tests.support.networks import TinyModel, WeightedSum, as_array, assert_close, normal, randomize, snapshot

DTYPES = ["float32", "float16", "bfloat16"]


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
    assert 0 < report.difference <= report.bound < 16 * unit * largest  # a bound tight enough to mean something
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


def test_every_block_of_a_weight_is_merged():
    cell = LoRADense(1100, 1201, 2, 4, has_bias=False)  # more than 2^20 elements, and not a whole number of blocks
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
    # Later values of A and B are again relative to the base, not to what was merged.
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


class Masking(Pair):
    """A Pair with minus infinity in one element of its first output."""

    def construct(self, x):
        return super().construct(x) + Tensor([0, float("-inf"), 0], ms.float32), x


def test_outputs_are_compared_where_infinities_mask(mode):
    network, x = adapted(Masking()), Tensor(normal(2, 7))
    report = merge_lora(network, x)
    finite = np.abs(network(x)[0].asnumpy()[:, ::2]).max()
    assert report.output_difference <= report.output_bound == pytest.approx(1e-3 * finite, rel=1e-3)


def test_training_that_went_unnoticed_is_warned_of(caplog):
    network = adapted(Pair())
    before = snapshot(network)
    merge_lora(network)
    randomize([network.second.mindpet_delta_lora_b])
    with caplog.at_level(logging.WARNING, "mindlora"):
        unmerge_lora(network)
    assert [record.getMessage() for record in caplog.records] == [
        "The adapter was changed while it was merged, at second, by training or by loading. The change is lost, as "
        "unmerge_lora restores the weights before the merge: call it before training or loading."
    ]
    assert snapshot(network) == before


def test_the_report_tells_what_was_merged_and_how_exactly(caplog):
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
Largest difference of the network's output on the given probe: {number}; up to {number} is allowed\.
Weights before the merge, on the host for unmerge_lora: 0\.0 MiB\.""",
        str(report),
    )
    assert caplog.records[-1].getMessage() == str(report)
    unmerge_lora(network)
    assert len(str(merge_and_unload(network)).splitlines()) == 2


def test_the_older_name_of_before_merge_bytes_warns():
    report = merge_lora(adapted(Pair()))
    with pytest.warns(DeprecationWarning, match="^kept_bytes is now before_merge_bytes"):
        assert report.kept_bytes == report.before_merge_bytes > 0
