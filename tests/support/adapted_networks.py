"""Puts LoRA on a network, for the tests of apply_lora and freeze_base; and the merged weights as an oracle."""

import numpy as np
from mindspore import Tensor

from mindlora import LoraConfig, LoRADense, apply_lora
from tests.support.networks import adapters, as_array, randomize

X = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)


def on(network, target_modules="all-linear", **fields):
    """Puts LoRA on a network and gives A and B normal values."""
    report = apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=target_modules, **fields))
    randomize(adapters(network).values())
    return report


def merge_by_hand(network, plain):
    """Adds scale B A of each adapter of ``network`` to the weight of the same cell of ``plain``."""
    cells = dict(plain.cells_and_names())
    for path, cell in network.cells_and_names():
        if isinstance(cell, LoRADense):
            a, b = (as_array(p) for p in cell.lora_parameters())
            weight = as_array(cell.weight) + cell.lora_alpha / cell.lora_rank * b @ a
            cells[path].weight.set_data(Tensor(weight.astype(np.float32)))
