"""What pet_config puts around the embedding of an mcore model: NEFTune's noise, and aLoRA's invocation tokens."""

import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora
from mindlora.network.cells.embedding import NoisyEmbedding
from mindlora.network.tree import lora_cells
from tests.support.mcore_networks import MAKE, TINY, Loss, tiny_qwen3, tokens
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.networks import randomize
from tests.support.what_runs import OF_EXPERTS, showing, shows

pytestmark = pytest.mark.usefixtures("module_in_graph_mode")

INVOCATION = [44, 5, 44]


@shows("neftune", "qwen3")
def test_noise_is_added_in_training_alone_and_anew_at_each_step():
    """The head, which is tied to the embedding, has none."""
    from mindformers.pet import get_pet_model

    from mindlora.training.launch import hooks  # noqa: F401

    ids, labels = Tensor(tokens()), Tensor(np.roll(tokens(), -1, 1))
    plain = tiny_qwen3(tie_word_embeddings=True)
    with mcore_in_pynative():
        logits = plain.set_train(False)(ids).asnumpy()
        loss = Loss(plain).set_train()(ids, labels).asnumpy()
    pet = {"pet_type": "lora", "target_modules": ["word_embeddings", "linear_qkv"], "neftune_alpha": 5}
    model = get_pet_model(tiny_qwen3(tie_word_embeddings=True), pet)
    network = model.network
    names = [p.name for p in network.get_parameters() if "mindpet" not in p.name]
    assert sorted(names) == sorted(p.name for p in plain.get_parameters())
    (noisy,) = [cell for _, cell in network.cells_and_names() if isinstance(cell, NoisyEmbedding)]
    with mcore_in_pynative():
        evaluated = model.set_train(False)(ids)[0].asnumpy()
    np.testing.assert_allclose(evaluated.reshape(logits.shape), logits, rtol=0, atol=1e-5)
    trained = Loss(network).set_train()
    losses = [float(trained(ids, labels).asnumpy().sum()) for _ in range(3)]
    assert len({float(loss.sum()), *losses}) == 4
    bound = 5 / np.sqrt(TINY["seq_length"] * TINY["hidden_size"])
    with mcore_in_pynative():
        noise = noisy.set_train()(ids).asnumpy() - noisy.embedding(ids).asnumpy()
    assert 0.9 * bound < np.abs(noise).max() <= bound + 1e-6


def rows():
    """Three rows: with the invocation in the middle, at the end, and without."""
    ids = tokens(rows=3)
    ids[ids == INVOCATION[1]] = 6
    ids[0, 4:7] = ids[1, 13:16] = INVOCATION
    return ids


@pytest.mark.parametrize("model", showing("alora", always=OF_EXPERTS))
def test_adapters_act_from_the_invocation_on_in_each_row(model):
    """The cells of a DeepSeek-V3 have rows of other shapes; PEFT judges those of a Qwen3."""
    ids, network = rows(), MAKE[model]()
    with mcore_in_pynative():
        base = network.set_train(False)(Tensor(ids)).asnumpy().reshape(3, 16, -1)
    config = LoraConfig(target_modules="all-linear", lora_rank=2, lora_alpha=2, alora_invocation_tokens=INVOCATION)
    apply_lora(network, config)
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed=1)
    found = network(Tensor(ids)).asnumpy().reshape(3, 16, -1)
    for row, start in enumerate([4, 13, 16]):
        assert np.array_equal(found[row, :start], base[row, :start])
        assert np.abs(found - base)[row, start:].min(initial=1) > 0
    # A row is the same beside others: the gate of each row is its own.
    beside_itself = network(Tensor(ids[[0, 0, 0]])).asnumpy().reshape(3, 16, -1)
    np.testing.assert_allclose(beside_itself[1], found[0], rtol=0, atol=1e-4)
