"""aLoRA on an mcore model against PEFT on transformers' Qwen3: logits and gradients."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, save_lora
from mindlora.network.tree import lora_cells
from tests.peers.test_alora_against_peft import INVOCATION, rows
from tests.peers.test_load_from_peft import key_of
from tests.support.mcore_networks import TINY, save_for_transformers, tiny_qwen3
from tests.support.mcore_pynative import pynative_operators
from tests.support.networks import randomize
from tests.support.peers.peer import arrays
from tests.support.what_runs import shows


@pytest.fixture(scope="module")
def base(mindformers, tmp_path_factory):
    return save_for_transformers(tiny_qwen3(), tmp_path_factory.mktemp("qwen3"))


def adapted(targets):
    """Returns a Qwen3 with adapters of random values that act from INVOCATION on."""
    network = tiny_qwen3()
    apply_lora(
        network, LoraConfig(target_modules=targets, lora_rank=4, lora_alpha=4, alora_invocation_tokens=INVOCATION)
    )
    freeze_base(network)
    randomize(network.trainable_params(), seed=1)
    return network


def test_the_logits_are_the_same(base, peer, tmp_path, pynative_mode):
    ids = rows(16) % TINY["vocab_size"]
    network = adapted("all-linear")
    assert len(list(lora_cells(network))) == 4
    with pynative_operators():
        both = [model.set_train(False)(Tensor(ids)).asnumpy() for model in (tiny_qwen3(), network)]
    plain, found = (logits.reshape(*ids.shape, -1) for logits in both)
    save_lora(network, tmp_path / "adapter")
    peer.logits(model=base, ids=ids.tolist(), path=tmp_path / "logits.npy", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(found, np.load(tmp_path / "logits.npy"), rtol=0, atol=2e-5)
    for row, start in enumerate([6, 11, 12, 16, 16]):
        assert np.abs(found - plain)[row, start:].max(initial=1) > 0.1
        np.testing.assert_array_equal(found[row, :start], plain[row, :start])


class Gradients(nn.Cell):
    """The loss of a network, and its gradients with respect to what trains."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network
        self.gradients = ms.value_and_grad(self.loss, None, network.trainable_params())

    def loss(self, ids, labels, mask):
        return self.network(ids, labels=labels, loss_mask=mask)[0].sum()

    def construct(self, ids, labels, mask):
        return self.gradients(ids, labels, mask)


@shows("alora", "qwen3")
def test_the_gradients_are_the_same(base, peer, tmp_path, graph_mode):
    ids = rows(16) % TINY["vocab_size"]
    network = adapted(["o_proj", "down_proj"])
    save_lora(network, tmp_path / "adapter")
    path = tmp_path / "gradients.safetensors"
    loss = peer.gradients(model=base, adapter=tmp_path / "adapter", ids=ids.tolist(), path=path)
    mask = np.ones(ids.shape, np.float32)
    mask[:, -1] = 0
    inputs = map(Tensor, (ids, np.roll(ids, -1, 1), mask))
    ours, gradients = Gradients(network.set_train())(*inputs)
    assert float(ours) == pytest.approx(loss, abs=5e-6)
    names = [key_of(parameter.name) for parameter in network.trainable_params()]
    expected = arrays(path)
    assert set(names) == set(expected)
    for name, gradient in zip(names, gradients):
        assert np.abs(expected[name]).max() > 1e-4
        np.testing.assert_allclose(gradient.asnumpy(), expected[name], rtol=0, atol=5e-6, err_msg=name)
