"""Bases that are served in the bits in which they are stored: what they decode to, and refusals by name."""

import os
import random

import numpy as np
import pytest

from mindlora.models import names
from mindlora.network.load_base import hold_base, load_base
from mindlora.network.quantized.quantized_dense import IntegerDense
from mindlora.serving.network import add_pools, build_network, linear_cells
from mindlora.serving.request import Request, Sampling
from mindlora.serving.runner import ModelRunner
from mindlora.serving.scheduler import Part
from mindlora.serving.settings import EngineSettings
from tests.support import held_bases
from tests.support.held_bases import HELD, save_bases

SETTINGS = EngineSettings(64, 4, num_blocks=64, max_running=4, max_tokens_per_step=80, slots=2, max_rank=8)


def network_of(kind, path, holds=False):
    """Returns a network for serving with its weights, and the notes on them."""
    network = build_network(held_bases.node(kind), SETTINGS)
    if holds:
        hold_base(network, path)
    return network, load_base(network, path, mapped=True)


def logits_of(network, steps):
    """Returns the logits after the prompts of each step, which are computed together."""
    cells = linear_cells(network)
    pools = add_pools(network, cells, SETTINGS)
    runner = ModelRunner(network, pools, np.dtype(np.float32), SETTINGS)
    free = random.Random(0).sample(range(64), 64)
    for prompts in steps:
        parts = []
        for prompt in prompts:
            request = Request(list(prompt), Sampling(max_tokens=1))
            request.lease = None
            request.blocks += [free.pop() for _ in range(-(-len(prompt) // 4))]
            parts.append(Part(request, 0, len(prompt)))
        yield runner.forward(parts)


def held_cells(network):
    return {cell.weight.name: cell for _, cell in network.cells_and_names() if isinstance(cell, IntegerDense)}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("form", HELD)
def test_each_weight_is_in_the_bits_of_the_file_and_decodes_to_what_the_reader_does(kind, form, tmp_path):
    path, _, decoded = save_bases(tmp_path, kind, form)
    network, notes = network_of(kind, path, holds=True)
    cells = held_cells(network)
    assert len(cells) == 14 and notes[0].startswith("14 weights are held in their own bits: ")
    stored = sum(
        os.path.getsize(os.path.join(path, name)) for name in os.listdir(path) if name.endswith(".safetensors")
    )
    for name, cell in cells.items():
        assert cell.quantization == held_bases.FORMS[form][3]
        weight = decoded[name if kind == "qwen3" else names.parameter_to_hugging_face(name)]
        # That of bitsandbytes is rounded in another order.
        near = 2e-7 * np.abs(weight).max() if form == "int8" else 0
        np.testing.assert_allclose(cell.by_rows()[:], weight, rtol=0, atol=near)
    held = sum(parameter.nbytes for parameter in network.get_parameters() if "cache" not in parameter.name)
    assert held < stored


@pytest.mark.parametrize("kind, form", [("llama", "w8a8-zeros"), ("qwen3", "awq"), ("qwen2", "gptq")])
def test_logits_are_those_of_the_decoded_base(graph_mode, kind, form, tmp_path, monkeypatch):
    path, decoded, _ = save_bases(tmp_path, kind, form)
    # By the kernel of few tokens, and by that of many; the decoded base computes both with that of many.
    steps = [(3, 4, 5)], [range(3, 60), range(70, 90)]
    of_held = list(logits_of(network_of(kind, path, holds=True)[0], steps))
    monkeypatch.setattr("mindlora.serving.network.FEW_TOKENS", 0)
    for held, expected in zip(of_held, logits_of(network_of(kind, decoded)[0], steps)):
        np.testing.assert_allclose(held, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
