"""Networks to merge, with values in every parameter; and the merged weights as an oracle, in float64."""

import numpy as np
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.network.tree import lora_cells
from tests.support.networks import as_array, randomize

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


class Answering(Pair):
    """Returns ``answer`` while merged, as a graph would that has the weight built in as a constant."""

    def __call__(self, x):
        return self.answer if self.first.merged else self.construct(x), x
