"""Adapters of a few cells of Stable Diffusion, and files of them written by hand, key by key."""

import json

import numpy as np
from safetensors.numpy import save_file

from mindlora.files.adapters.adapter import Adapter

ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
Q, OUT = f"unet.{ATTENTION}.to_q", f"unet.{ATTENTION}.to_out.0"
CONV = "unet.down_blocks.0.resnets.0.conv1"
TEXT = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
# Path -> (rank, lora_alpha, shape of A without r, shape of B without r).
CELLS = {Q: (4, 8.0, (6,), 5), OUT: (2, 3.0, (5,), 6), CONV: (3, 1.5, (4, 3, 3), 7), TEXT: (4, 4.0, (6,), 6)}


def pair(rng, rank, ends, out, dtype=np.float32):
    """Returns a normal A [r, *ends] and B [out, r], or [out, r, 1, 1] for a convolution."""
    b = (out, rank, 1, 1) if len(ends) == 3 else (out, rank)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in ((rank, *ends), b))


def make(paths=tuple(CELLS), dtype=np.float32, **fields):
    """Returns an adapter of these cells, with mixed ranks and alphas."""
    rng, tensors, alphas = np.random.default_rng(0), {}, {}
    for path in CELLS:
        rank, alpha, ends, out = CELLS[path]
        a, b = pair(rng, rank, ends, out, dtype)
        if path in paths:
            tensors[path, "A"], tensors[path, "B"] = a, b
            alphas[path] = alpha
    return Adapter(tensors, alphas, **fields)


def saved(path, tensors, **header):
    """Writes a safetensors file; what is in the header and not text is written as JSON."""
    strings = {key: value if isinstance(value, str) else json.dumps(value) for key, value in header.items()}
    # A view of another array would be written without regard to its strides.
    save_file({key: np.ascontiguousarray(array) for key, array in tensors.items()}, str(path), strings or None)
    return str(path)


def assert_same_pairs(found, expected):
    """Asserts that two adapters have the same cells, bits and scales."""
    assert found.tensors.keys() == expected.tensors.keys()
    for key, array in expected.tensors.items():
        assert found.tensors[key].dtype == array.dtype and found.tensors[key].shape == array.shape, key
        assert found.tensors[key].tobytes() == array.tobytes(), key
    assert {path: found.scale(path) for path in found.paths} == {path: expected.scale(path) for path in expected.paths}
