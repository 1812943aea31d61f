"""apply_lora on MindFormers' Llama, with separate and with joined cells."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.core.errors import TargetError
from tests.support.adapted_networks import merge_by_hand, on
from tests.support.networks import adapters

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
    merge_by_hand(network, merged)
    return network, merged


def test_llama_in_graph_mode_computes_as_with_merged_weights(make_llama):
    network, merged = llama_with_and_without(make_llama, "all-linear")
    assert len(adapters(network)) == 2 * 2 * 7
    np.testing.assert_allclose(logits(network), logits(merged), rtol=0, atol=1e-4 * np.abs(logits(merged)).max())
    assert "model.layers.0.feed_forward.w1.mindpet_delta_lora_a" in adapters(network)


@pytest.mark.parametrize(
    "target_modules, replaced",
    [
        (".*wq|.*wk|.*wv|.*wo", ["attention.w_qkv", "attention.wo"]),
        (["w_gate_hidden"], ["feed_forward.w_gate_hidden"]),
        ("all-linear", ["attention.w_qkv", "attention.wo", "feed_forward.w_gate_hidden", "feed_forward.w2"]),
    ],
)
def test_llama_with_qkv_concat(make_llama, target_modules, replaced):
    network = make_llama(qkv_concat=True)
    assert on(network, target_modules).replaced == tuple(
        f"model.layers.{i}.{leaf}" for i in range(2) for leaf in replaced
    )
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
        "Name w_qkv, or wk as well, or build the model with qkv_concat: False."
    )


def test_a_parent_cell_of_llama_is_named_as_one(make_llama):
    with pytest.raises(
        TargetError,
        match="'feed_forward' does match model.layers.0.feed_forward, but that is a "
        "LlamaFeedForward and not a linear cell.",
    ):
        on(make_llama(), ["feed_forward"])
