"""What merge_lora, unmerge_lora and merge_and_unload refuse or undo, leaving every byte as it was."""

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense, LoraError, apply_lora
from mindlora.core.errors import MergeError
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from tests.support.merged_networks import CONFIG, Answering, Pair, adapted
from tests.support.networks import WeightedSum, normal, randomize
from tests.support.refusals import refused_unchanged

DTYPES = ["float32", "float16", "bfloat16"]


def merge_refused(call, network, message, *probe, kind=MergeError):
    """Asserts that ``call`` is refused for ``network``, which stays as it was."""
    refused_unchanged(network, kind, message, call, network, *probe)


NOT_FINITE = "1: W, A or B holds NaN or infinity, so nothing was merged."


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
            r"rounding to float16 explains no more than [0-9.e+]+\. The merge is undone: keep the adapter unmerged, or "
            "load",
        ),
    ],
)
def test_what_leaves_the_range_of_the_weight_is_undone(dtype, name, value, message):
    network = adapted(nn.CellList([nn.Dense(7, 5), nn.Dense(60, 3, dtype=getattr(ms, dtype))]))
    array = getattr(network[1], name).asnumpy().copy()
    array[0, 0] = value
    getattr(network[1], name).set_data(Tensor(array))
    for call in (merge_lora, merge_and_unload):
        merge_refused(call, network, re.compile(message))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_update_that_does_not_arrive_in_the_weight_is_noticed(monkeypatch, dtype):
    cell = LoRADense(600, 5, 2, 2, has_bias=False, dtype=getattr(ms, dtype))
    randomize(cell.get_parameters())
    b = {"float32": 1.6e-7, "float16": 6.4e-4, "bfloat16": 5.2e-3}[dtype] * normal(5, 2)  # elements of W are about 1
    cell.mindpet_delta_lora_b.set_data(Tensor(b))
    monkeypatch.setattr(cell.weight, "set_data", lambda data: None)
    merge_refused(merge_lora, cell, re.compile(f"LoRADense: .* differs by [0-9.e-]+, and rounding to {dtype}"))


@pytest.mark.parametrize("change", [1, 0.01, np.nan])
def test_an_output_that_changes_is_undone(change):
    network, x = adapted(Answering()), Tensor(normal(2, 7))
    network.answer = network(x)[0] + change
    allowed = 1e-3 * np.abs(network(x)[0].asnumpy()).max()
    merge_refused(
        merge_lora,
        network,
        f"Merged, the network's output on the given probe differs by {change}, and rounding "
        f"explains about {allowed:.3g}. The merge is undone: keep the adapter unmerged, or leave the probe out if "
        "the output is itself random.",
        x,
    )


@pytest.mark.parametrize("call", [merge_lora, merge_and_unload])
def test_what_cannot_be_merged_is_refused(call):
    merge_refused(
        call,
        Pair(),
        "The network holds no LoRADense cell, so there is no adapter to merge or unmerge. Call "
        "apply_lora, and load_lora, first.",
        kind=LoraError,
    )
    merge_refused(
        call,
        adapted(Pair()).set_train(),
        "The network is in training mode, at first, second: call network.set_train(False) before merging.",
    )
    merge_refused(
        call,
        nn.CellList([LoRADense(3, 2, 1, 1, dtype=ms.float64)]),
        "The weight of 0 is Float64: merging needs float32, float16 or bfloat16. Load the base in "
        "one of these, or leave the cell out of target_modules.",
    )


def test_a_lone_cell_is_not_unloaded():
    merge_refused(
        merge_and_unload,
        LoRADense(5, 3, 2, 4),
        "The network is itself a LoRADense, so there is no cell around it to "
        "put the plain one into. Use merge_lora, or put it into a network.",
    )


def test_merging_twice_and_unmerging_twice_are_refused():
    network = adapted(Pair())
    for _ in range(2):
        merge_refused(
            unmerge_lora, network, "No adapter of the network is merged: call unmerge_lora only after merge_lora."
        )
        merge_lora(network)
        for call in (merge_lora, merge_and_unload):
            merge_refused(call, network, "Adapters are merged already, at first, second: call unmerge_lora first.")
        unmerge_lora(network)
    merge_lora(network.first)
    merge_refused(merge_lora, network, "Adapters are merged already, at first: call unmerge_lora first.")
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


@pytest.mark.parametrize("call", [merge_lora, merge_and_unload])
def test_a_weight_that_another_cell_uses_is_refused(make_llama, call):
    llama, network = make_llama(tie_word_embeddings=True), nn.CellList([nn.Dense(6, 6), nn.Dense(6, 6)])
    apply_lora(llama, LoraConfig(target_modules=".*wq|lm_head"))
    merge_refused(
        call,
        llama,
        "lm_head shares its weight with model.tok_embeddings (embedding_weight), which merging would "
        "change too. Keep the adapter unmerged, or untie the two before apply_lora.",
    )
    network[1].weight = network[0].weight
    apply_lora(network, CONFIG)
    merge_refused(call, network, re.compile(r"[01] shares its weight with [01] \(weight\), which merging"))


def test_an_output_that_is_no_tensor_and_a_weight_without_values_are_refused(monkeypatch):
    network = adapted(Answering())
    monkeypatch.setattr(Answering, "__call__", lambda self, x: (5, x))
    merge_refused(
        merge_lora,
        network,
        "The network's first output on the probe is of type int: it must be a Tensor, which can be "
        "compared before and after merging.",
        0,
    )
    monkeypatch.setattr(type(network.first.weight), "has_init", True)
    with pytest.raises(
        MergeError, match="^The weights of first, second have no values yet: load the base checkpoint before mer"
    ):
        merge_lora(network)
