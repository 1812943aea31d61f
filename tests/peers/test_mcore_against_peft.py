"""An adapter of a MindFormers mcore model, in PEFT on the Qwen3 of transformers: the same logits."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, load_lora, save_lora
from mindlora.network.tree import lora_cells
from tests.support.mcore_networks import TINY, save_for_transformers, tiny_qwen3, tokens
from tests.support.networks import randomize

LAYERS, IDS = 2, tokens(rows=1)


@pytest.fixture(scope="module")
def network(mindformers):
    """A Qwen3 of two layers on which an adapter can be put, in evaluation mode."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    yield tiny_qwen3(num_hidden_layers=LAYERS).set_train(False)
    ms.set_context(mode=before)


@pytest.fixture(scope="module")
def base(network, tmp_path_factory):
    """The same model as a folder of transformers, converted by mindlora."""
    return save_for_transformers(network, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def judged(peer, base, tmp_path_factory):
    """Returns a function that returns PEFT's logits of IDS [tokens, vocabulary], with an adapter or without one."""
    folder = tmp_path_factory.mktemp("logits")

    def logits(adapter=None):
        peer.logits(model=base, ids=IDS.tolist(), path=folder / "logits.npy", adapter=adapter)
        return np.load(folder / "logits.npy").reshape(-1, TINY["vocab_size"])

    return logits


def test_peft_gives_the_same_logits(network, judged, tmp_path):
    config = LoraConfig(target_modules="all-linear", lora_rank=4, lora_alpha=8, modules_to_save=["norm"])
    apply_lora(network, config)
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed=1)
    ours = network(Tensor(IDS)).asnumpy()
    save_lora(network, tmp_path / "adapter")
    theirs = judged(tmp_path / "adapter")
    assert np.abs(theirs - judged()).max() > 1
    # MindFormers computes attention in float16, whatever compute_dtype is.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-3 * np.abs(theirs).max())
    other = tiny_qwen3(num_hidden_layers=LAYERS)
    load_lora(other, tmp_path / "adapter")
    pairs = {path: cell.pair() for path, cell in lora_cells(network)}
    assert all(np.array_equal(a, b) for path, cell in lora_cells(other) for a, b in zip(cell.pair(), pairs[path]))
