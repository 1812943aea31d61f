"""Adapters of the same base, for the tests of combine_adapters."""

import numpy as np

from mindlora.files.adapters.adapter import Adapter

WQ, WK, W1 = "model.layers.0.attention.wq", "model.layers.0.attention.wk", "model.layers.1.feed_forward.w1"
SIZES = {WQ: (12, 10), WK: (6, 10), W1: (14, 10)}
WEIGHTS = [0.7, -0.4, 1.5]


def make(seed, ranks, alpha=6.0, dtype=np.float32, **fields):
    """Returns an adapter of random tensors; ``ranks`` is path -> r."""
    random = np.random.default_rng(seed)
    tensors = {}
    for path, rank in ranks.items():
        out, width = SIZES[path]
        tensors[path, "A"] = random.normal(size=(rank, width)).astype(dtype)
        tensors[path, "B"] = random.normal(size=(out, rank)).astype(dtype)
    return Adapter(tensors, alphas=dict.fromkeys(ranks, alpha), **fields)


def three_adapters():
    """Three adapters of rank 3 with different scales; wk is missing in the second, only the third has w1."""
    return [make(0, {WQ: 3, WK: 3}, 6.0), make(1, {WQ: 3}, 2.0), make(2, {WQ: 3, WK: 3, W1: 3}, 3.0)]
