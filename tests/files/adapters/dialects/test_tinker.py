"""Tinker's adapters, against what Tinker's own cookbook makes of them for PEFT.

tinker_cookbook/ has, for a tiny Qwen3 and Qwen3-MoE, an adapter with Tinker's keys and the folder that
tinker_cookbook.weights.build_lora_adapter (0.6.1) wrote of it.
"""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora import convert_adapter
from mindlora.core.errors import MissingTensorsError, RankMismatchError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.files.adapters import files as adapter_files

GOLDEN = pathlib.Path(__file__).parent / "tinker_cookbook"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
EXPERT = "base_model.model.model.layers.0.mlp.experts.w1.lora_{}.weight"


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_an_adapter_is_what_the_cookbook_makes_of_it(name, tmp_path):
    found, expected = (adapter_files.read(str(GOLDEN / folder)) for folder in (name, f"{name}_peft"))
    assert found.dialect == "Tinker" and expected.dialect == "PEFT"
    assert found.tensors.keys() == expected.tensors.keys() and "lm_head" in found.paths
    assert found.alphas == expected.alphas and {found.scale(path) for path in found.paths} == {16.0}
    for key, array in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[key], array)
    convert_adapter(str(GOLDEN / name), str(tmp_path / "peft"), "peft")
    written, golden = (load_file(folder / WEIGHTS) for folder in (tmp_path / "peft", GOLDEN / f"{name}_peft"))
    assert written.keys() == golden.keys() and all((written[key] == golden[key]).all() for key in golden)


def changed(folder, drop=(), config=None, **arrays):
    """Writes the adapter with experts without some tensors and with others; returns the folder."""
    shutil.copytree(GOLDEN / "experts", folder)
    tensors = {key: array for key, array in load_file(folder / WEIGHTS).items() if key not in drop}
    save_file({**tensors, **arrays}, folder / WEIGHTS)
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps({**settings, **(config or {})}), encoding="utf-8")
    return str(folder)


def test_experts_of_a_smaller_rank_have_the_scale_of_the_configuration(tmp_path):
    a, b = np.ones((2, 1, 4), np.float32), np.ones((2, 3, 1), np.float32)
    found = adapter_files.read(changed(tmp_path / "small", **{EXPERT.format("A"): a, EXPERT.format("B"): b}))
    assert found.rank("model.layers.0.mlp.experts.1.gate_proj") == 1
    assert {found.scale(path) for path in found.paths} == {16.0}


ONE, TWO, THREE = (np.ones((count, 2, 4), np.float32) for count in (1, 2, 3))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"drop": [EXPERT.format("B")]}, MissingTensorsError, "holds one of A and B of .*experts.w1 alone"),
        ({EXPERT.format("A"): THREE}, ShapeMismatchError, r"A of .*w1 is \[3, 2, 4\] .* of as many experts"),
        ({EXPERT.format("A"): ONE[0]}, ShapeMismatchError, r"must be \[experts, r, in\]"),
        ({EXPERT.format("A"): ONE, EXPERT.format("B"): np.ones((1, 3, 2), np.float32)}, ShapeMismatchError, "w1"),
        ({"base_model.model.model.norm.weight": ONE[0]}, UnexpectedTensorsError, "not LoRA's: .*norm"),
        ({"config": {"r": 4}}, RankMismatchError, "declares rank 4 and the tensors have 2"),
    ],
)
def test_refusals(change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        adapter_files.read(changed(tmp_path / "changed", **change))
