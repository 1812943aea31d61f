"""A Llama with fused operators has the losses and gradients of MindFormers' own, and says where it cannot have them."""

import logging

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.ops import backend
from mindlora.plugin.graph.cpu_cells import use_cpu_cells

CASES = {
    "heads that share keys": {},
    "a head of keys for each of queries, layers recomputed": {"n_kv_heads": 4, "recompute": True},
    "joined cells, odd sizes": {"qkv_concat": True, "hidden_size": 24, "seq_length": 21},
}
LINEAR = ".*(wq|wk|wv|w_qkv|wo|w1|w2|w3|w_gate_hidden)"


@pytest.fixture
def build(make_llama, graph_mode):
    """Returns a function that builds a Llama with an adapter, whose norms train too, of weights that differ."""

    def built(recompute=False, **keys):
        network = make_llama(**{"batch_size": 2, "seq_length": 24, "hidden_size": 32, **keys})
        for layer in network.model.layers if recompute else ():
            layer.recompute()
        config = LoraConfig(lora_rank=4, target_modules=LINEAR)
        apply_lora(network, config)
        freeze_base(network, config)
        draws = np.random.default_rng(1)
        for parameter in network.get_parameters():
            is_norm = "norm" in parameter.name
            parameter.requires_grad = parameter.requires_grad or is_norm
            size = 0.3 if is_norm else 0.3 / np.sqrt(parameter.shape[-1])
            values = draws.normal(is_norm, size, parameter.shape)
            parameter.set_data(Tensor(values.astype(np.float32)))
        return network.set_train()

    return built


class Step(nn.Cell):
    """The loss of a network and its gradients."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.weights = network, ms.ParameterTuple(network.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, tokens):
        return self.network(tokens), self.gradient(self.network, self.weights)(tokens)


def padded(length):
    """Returns two rows of tokens, of which the second ends in padding."""
    tokens = np.random.default_rng(2).integers(1, 64, (2, length + 1)).astype(np.int32)
    tokens[1, length - 6 :] = 0
    return Tensor(tokens)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_mindformers(name, build, library):
    keys = CASES[name]
    ours, theirs = build(**keys), build(**keys)
    use_cpu_cells(ours)
    assert {type(ours.model.norm_out).__name__, type(ours.model.layers[0].attention).__name__} == {
        "CpuRMSNorm",
        "CpuAttention",
    }
    tokens = padded(ours.config.seq_length)
    loss, gradients = Step(ours)(tokens)
    expected_loss, expected = Step(theirs)(tokens)
    np.testing.assert_allclose(loss.asnumpy(), expected_loss.asnumpy(), rtol=1e-6)
    gradients, expected = ([gradient.asnumpy() for gradient in side] for side in (gradients, expected))
    for parameter, gradient, wanted in zip(ours.trainable_params(), gradients, expected):
        # The exponentials of MindSpore's softmax on a CPU are good to 5e-7, and some gradients nearly cancel.
        assert distance([gradient], [wanted]) < 1e-5, parameter.name
    assert distance(gradients, expected) < 5e-6


def distance(gradients, expected):
    """Returns the norm of the difference, relative to that of ``expected``."""
    differences = [gradient - wanted for gradient, wanted in zip(gradients, expected)]
    return np.linalg.norm(np.concatenate(differences, axis=None)) / np.linalg.norm(np.concatenate(expected, axis=None))


def test_a_library_that_is_missing_is_told(build, monkeypatch, tmp_path, caplog):
    network = build()
    monkeypatch.setattr(backend, "LIBRARY", str(tmp_path / "libmindlora_cpu.so"))
    with caplog.at_level(logging.WARNING):
        use_cpu_cells(network)
    assert type(network.model.norm_out).__name__ == "LlamaRMSNorm"
    assert "libmindlora_cpu.so is missing" in caplog.text
