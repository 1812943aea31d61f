"""merge_checkpoint with an adapter of routed experts: bases that keep the experts apart, and bases that stack them."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora.files.adapters import expert_pairs
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.base import writer
from mindlora.files.base.merge import merge_checkpoint

HOLDER = "mlp.experts"
EXPERTS, HIDDEN, INNER, RANK = 3, 7, 5, 2
SIZES = {"weight1": (HIDDEN, 2 * INNER), "weight2": (INNER, HIDDEN)}


def adapter():
    rng, tensors = np.random.default_rng(1), {}
    for leaf, (columns, rows) in SIZES.items():
        path = f"model.layers.0.{HOLDER}.{leaf}"
        tensors[path, "A"] = rng.normal(size=(EXPERTS, RANK, columns)).astype(np.float32)
        tensors[path, "B"] = rng.normal(size=(EXPERTS, rows, RANK)).astype(np.float32)
    return Adapter(tensors, dict.fromkeys((path for path, _ in tensors), 3.0))


@pytest.fixture(scope="module")
def weights():
    """The experts' weights [experts, in, out]."""
    rng = np.random.default_rng(0)
    return {leaf: rng.normal(size=(EXPERTS, *size)).astype(np.float32) for leaf, size in SIZES.items()}


def saved(folder, tensors):
    """Saves a base with what tells that it is a Qwen3-MoE."""
    folder.mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def apart(weights):
    """Returns the weights under Hugging Face's names, each expert by itself [out, in]."""
    tensors = {"model.layers.0.mlp.gate.weight": np.ones((EXPERTS, HIDDEN), np.float32)}
    for expert in range(EXPERTS):
        gate, up = np.split(weights["weight1"][expert], 2, axis=1)
        for cell, weight in (("gate", gate), ("up", up), ("down", weights["weight2"][expert])):
            tensors[f"model.layers.0.{HOLDER}.{expert}.{cell}_proj.weight"] = weight.T
    return tensors


def stacked(weights):
    """Returns the weights under mcore's names [experts * in, out]."""
    tensors = {"decoder.layers.0.mlp.router.weight": np.ones((EXPERTS, HIDDEN), np.float32)}
    for leaf, weight in weights.items():
        tensors[f"decoder.layers.0.{HOLDER}.{leaf}"] = weight.reshape(-1, weight.shape[2])
    return tensors


@pytest.mark.parametrize("form", [apart, stacked])
@pytest.mark.parametrize("single", [False, True], ids=["a stacked adapter", "single experts"])
def test_each_expert_gets_its_own_product(tmp_path, monkeypatch, weights, form, single):
    # Blocks of a few rows, which begin and end within an expert.
    monkeypatch.setattr(writer, "_BLOCK", 100)
    found, base = adapter(), saved(tmp_path / "base", form(weights))
    if single:
        expert_pairs.unstack_pairs(found)
    adapter_files.write(found, str(tmp_path / "adapter"))
    merge_checkpoint(str(base), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    changed = {}
    for leaf, weight in weights.items():
        a, b = (adapter().tensors[f"model.layers.0.{HOLDER}.{leaf}", half].astype(np.float64) for half in "AB")
        changed[leaf] = weight + 3.0 / RANK * np.einsum("eri,eor->eio", a, b)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, expected in form(changed).items():
        np.testing.assert_allclose(merged[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)
