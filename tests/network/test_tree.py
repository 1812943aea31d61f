"""Tree: a network is walked once for each of its states while it gets adapters."""

import sys

import pytest
from mindspore import nn

from mindlora import LoraConfig, apply_lora, freeze_base
from tests.support.networks import TinyModel


@pytest.fixture
def walks(monkeypatch):
    """Returns a list that gets the network of each walk over all its cells; MindSpore's goes on from cell to cell."""
    begun = []
    walk = nn.Cell.cells_and_names

    def counted(self, *arguments, **named):
        if sys._getframe(1).f_code is not walk.__code__:
            begun.append(self)
        return walk(self, *arguments, **named)

    monkeypatch.setattr(nn.Cell, "cells_and_names", counted)
    return begun


@pytest.mark.parametrize("quantized, states", [(None, 1), ("nf4", 2)])
def test_a_network_is_walked_once_for_each_state_and_once_to_count(walks, quantized, states):
    network = TinyModel()
    config = LoraConfig(lora_rank=2, lora_alpha=4, target_modules="all-linear", quantize_base=quantized)
    walks.clear()
    apply_lora(network, config)
    assert sum(walked is network for walked in walks) == states + 1
    walks.clear()
    freeze_base(network, config)
    assert sum(walked is network for walked in walks) == 1
