"""A Llama with fused operators and cells has the losses and gradients of MindFormers' own, and says where it cannot."""

import logging
import re

import mindspore as ms
import numpy as np
import pytest
from mindformers.models.llama.llama_layer import LlamaSiLU
from mindspore import Tensor, nn, ops

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.ops import backend
from mindlora.training.model.cpu_cells import CpuSiLU, use_cpu_cells
from tests.conftest import in_mode
from tests.support.saved_tensors import compiled_graph

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
        network = make_llama(**{"batch_size": 2, "num_layers": 1, "seq_length": 24, "hidden_size": 32, **keys})
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
    if "qkv_concat" in keys and ms.__version__ < "2.9":
        pytest.skip("SplitWithSize, which qkv_concat needs, has no CPU kernel before MindSpore 2.9")
    ours, theirs = build(**keys), build(**{**keys, "recompute": False})
    use_cpu_cells(ours)
    assert {type(ours.model.norm_out).__name__, type(ours.model.layers[0].attention).__name__} == {
        "CpuRMSNorm",
        "CpuAttention",
    }
    tokens = padded(ours.config.seq_length)
    loss, gradients = Step(ours)(tokens)
    with in_mode(ms.PYNATIVE_MODE):
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


class Slope(nn.Cell):
    """SiLU of x, and its gradient for an output's gradient dy."""

    def __init__(self):
        super().__init__()
        self.silu = CpuSiLU(LlamaSiLU().silu)
        self.gradient = ops.GradOperation(sens_param=True)

    def construct(self, x, dy):
        return self.silu(x), self.gradient(self.silu)(x, dy)


def test_silu_and_its_gradient():
    x, dy = np.random.default_rng(3).normal(size=(2, 5, 7)).astype(np.float32) * 4
    y, gradient = Slope()(Tensor(x), Tensor(dy))
    sigmoid = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(y.asnumpy(), x * sigmoid, rtol=1e-5)
    np.testing.assert_allclose(gradient.asnumpy(), dy * sigmoid * (1 + x * (1 - sigmoid)), rtol=1e-5, atol=1e-6)


def test_the_sigmoid_waits_for_the_backward(graph_mode, tmp_path, monkeypatch):
    x = Tensor(np.ones((5, 7), np.float32))
    with open(compiled_graph(Slope(), [x, x], tmp_path, monkeypatch), encoding="utf-8") as file:
        text = file.read()
    waiting = re.findall(r"^  %(\d+)\(.*?\) = Depend\(", text, re.MULTILINE)
    taken = re.findall(r" = (?:PrimFunc_)?Sigmoid\(%(\d+)\)", text)
    assert taken and set(taken) <= set(waiting)
