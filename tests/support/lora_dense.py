"""A small LoRADense and its oracle, for the tests of LoRADense."""

import mindspore as ms
import pytest
from mindspore import nn

from mindlora import LoraConfig, LoRADense
from tests.support.networks import LINEAR_CELLS, as_array, lora_forward, randomize

IN, OUT, RANK, ALPHA = 7, 5, 3, 4.5
SCALE = ALPHA / RANK
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
IN_GRAPH_MODE = pytest.mark.parametrize("mode", [ms.GRAPH_MODE], indirect=True)
# Each linear cell in PyNative; as a graph, of each class one, and all of biases and activations.
_CELLS_IN_MODES = [(ms.GRAPH_MODE, name) for name in ("dense", "dense with relu", "linear with silu", "mint")]
_CELLS_IN_MODES += [(ms.PYNATIVE_MODE, name) for name in LINEAR_CELLS]
EACH_CELL = pytest.mark.parametrize(
    "mode, plain",
    _CELLS_IN_MODES,
    indirect=True,
    ids=[f"{'pynative' if mode else 'graph'}-{name}" for mode, name in _CELLS_IN_MODES],
)


def adapted(cell, config=CONFIG):
    """Returns a LoRADense over ``cell`` whose A and B are normal."""
    lora = LoRADense.from_dense(cell, config)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def oracle(lora, x, activation=None):
    """Returns what a LoRADense must compute."""
    a, b = lora.lora_parameters()
    return lora_forward(
        x,
        as_array(lora.weight),
        as_array(a),
        as_array(b),
        lora.lora_alpha / lora.lora_rank,
        None if lora.bias is None else as_array(lora.bias),
        activation,
    )


class Each(nn.Cell):
    """Calls a cell on each of several inputs, in one graph, which compiles faster than several."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell

    def construct(self, *inputs):
        outputs = ()
        for x in inputs:
            outputs += (self.cell(x),)
        return outputs
