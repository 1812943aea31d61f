"""Networks without adapters, adapters made by hand, and what load_lora must make of them."""

import json
import os

import numpy as np
from mindspore import Tensor

from mindlora import LoRADense
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from tests.support.networks import TinyModel, randomize
from tests.support.saved_adapters import load_refused

CONFIG = "adapter_config.json"
SIZES = {"wq": (6, 6), "wk": (6, 4), "wv": (6, 4), "wo": (6, 6), "w1": (6, 9), "w2": (9, 6), "w3": (6, 9)}


def plain(cell=TinyModel, seed=5):
    """Returns a network with normal weights from a seed."""
    network = cell()
    randomize(network.get_parameters(), seed)
    network.set_train(False)
    return network


def pair(rng, leaf, rank):
    """Returns a normal A and B for a cell of TinyModel."""
    in_channels, out_channels = SIZES[leaf]
    return tuple(rng.normal(size=size).astype(np.float32) for size in ((rank, in_channels), (out_channels, rank)))


def make_adapter(leaves=("wq", "w2"), ranks=(2,), alphas=(3.0,), layers=(0, 1), seed=1, **fields):
    """Returns an Adapter with a pair for each leaf in each layer; ranks and alphas take turns."""
    rng, tensors, alpha_of = np.random.default_rng(seed), {}, {}
    for index, (layer, leaf) in enumerate((layer, leaf) for layer in layers for leaf in leaves):
        path = f"model.layers.{layer}.{'feed_forward' if leaf in ('w1', 'w2', 'w3') else 'attention'}.{leaf}"
        tensors[path, "A"], tensors[path, "B"] = pair(rng, leaf, ranks[index % len(ranks)])
        alpha_of[path] = alphas[index % len(alphas)]
    return Adapter(tensors, alpha_of, **fields)


def folder(tmp_path, adapter, **config):
    """Writes PEFT's folder, with some fields of its configuration changed."""
    path = str(tmp_path / "adapter")
    adapter_files.write(adapter, path)
    file = os.path.join(path, CONFIG)
    with open(file, encoding="utf-8") as read:
        content = {**json.load(read), **config}
    with open(file, "w", encoding="utf-8") as written:
        json.dump(content, written)
    return path


def merged(network, adapter):
    """Returns the outputs of ``network`` with scale B A added to its weights by hand."""
    for path in adapter.paths:
        a, b = (adapter.tensors[path, half].astype(np.float64) for half in "AB")
        rank = len(a)
        scale = adapter.alphas[path] / (rank**0.5 if adapter.use_rslora else rank)
        (weight,) = (p for p in network.get_parameters() if p.name == path + ".weight")
        weight.set_data(Tensor((weight.asnumpy() + scale * b @ a).astype(np.float32)))
    return network(inputs()).asnumpy()


def inputs():
    """Returns the same input each time."""
    return Tensor(np.random.default_rng(9).normal(size=(2, 3, 6)).astype(np.float32))


def lora_on(network):
    """Returns the paths of the cells that have an adapter."""
    return [name for name, cell in network.cells_and_names() if isinstance(cell, LoRADense)]


def plain_load_refused(path, error, message, cell=TinyModel, **arguments):
    """Does what load_refused does, for a network without adapters."""
    load_refused(plain(cell), path, error, message, **arguments)
