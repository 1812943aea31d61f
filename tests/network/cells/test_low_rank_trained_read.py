"""What a compiled step computes from A and B is not kept until it writes to them."""

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from mindlora import LoraConfig
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.embedding import LoRAEmbedding
from mindlora.network.variants.miss import MiSSDense
from tests.support.saved_tensors import compiled_graph


class Step(nn.Cell):
    """A step of gradient descent that is skipped, as a train step is, if a gradient is not finite."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.weights = network, ms.ParameterTuple(network.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, x):
        gradients = self.gradient(self.network, self.weights)(x)
        norm = 0.0
        for gradient in gradients:
            norm = norm + (gradient * gradient).sum()
        if ops.isfinite(norm):
            for weight, gradient in zip(self.weights, gradients):
                norm = ops.depend(norm, ops.assign(weight, weight - 0.1 * gradient))
        return norm


def dense():
    return LoRADense.from_dense(nn.Dense(6, 5), LoraConfig(lora_rank=2, lora_b_init="normal"))


def miss():
    return MiSSDense.from_cell(nn.Dense(6, 5), LoraConfig(lora_rank=2, use_miss=True))


def embedding():
    return LoRAEmbedding.from_cell(nn.Embedding(6, 5), LoraConfig(lora_rank=2))


def step_of(make):
    ms.set_seed(1)
    network = make()
    for parameter in network.get_parameters():
        parameter.requires_grad = "mindpet" in parameter.name
    x = np.arange(6) if make is embedding else np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    return Step(network.set_train()), ms.Tensor(x)


def products_kept(step, x, folder, monkeypatch):
    """Returns how many products the graph keeps for a write, which waits for them."""
    with open(compiled_graph(step, [x], folder, monkeypatch), encoding="utf-8") as file:
        # The first of the graphs in the file is the step, the others its branches.
        text = file.read().split("\nsubgraph @")[1]
    products = re.findall(r"^  %(\d+)\(.*?\) = (?:PrimFunc_)?MatMul\(", text, re.MULTILINE)
    awaited = re.findall(r"%(\d+)", " ".join(re.findall(r" = UpdateState\((.*?)\)", text)))
    assert products and awaited
    return len(set(products) & set(awaited))


@pytest.mark.parametrize("make", [dense, miss, embedding])
def test_no_product_of_a_trained_parameter_is_kept_for_the_update(make, graph_mode, tmp_path, monkeypatch):
    step, x = step_of(make)
    assert products_kept(step, x, tmp_path, monkeypatch) == 0


def test_without_copies_products_are_kept_and_the_step_is_the_same(graph_mode, tmp_path, monkeypatch):
    step, x = step_of(dense)
    step(x)
    plain, x = step_of(dense)
    monkeypatch.setattr(plain.network.trained, "copies", False)
    assert products_kept(plain, x, tmp_path, monkeypatch) > 0
    for first, second in zip(step.weights, plain.weights):
        np.testing.assert_array_equal(first.asnumpy(), second.asnumpy())
