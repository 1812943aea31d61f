"""PEFT's form of LoRA on stacked experts (target_parameters): its keys, its matrices, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora.core.errors import (
    AdapterError,
    AdapterFormatError,
    MissingTensorsError,
    RankMismatchError,
    ShapeMismatchError,
)
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter

HOLDER = "model.layers.0.mlp.experts"
PREFIX = f"base_model.model.{HOLDER}"
EXPERTS, RANK = 3, 2
SIZES = {"weight1": (8, 5), "weight2": (5, 4)}
Q = "model.layers.0.attention.wq"


def adapter(*leaves, ranks=None, dropout=0.0):
    rng, tensors = np.random.default_rng(0), {}
    for leaf in leaves or SIZES:
        (rows, columns), rank = SIZES[leaf], (ranks or {}).get(leaf, RANK)
        tensors[f"{HOLDER}.{leaf}", "A"] = rng.normal(size=(EXPERTS, rank, columns)).astype(np.float32)
        tensors[f"{HOLDER}.{leaf}", "B"] = rng.normal(size=(EXPERTS, rows, rank)).astype(np.float32)
    tensors[Q, "A"], tensors[Q, "B"] = np.ones((RANK, 5), np.float32), np.ones((6, RANK), np.float32)
    return Adapter(tensors, {path: 3.0 for path, _ in tensors}, dropout=dropout)


def written(folder, found, **fields):
    """Writes an adapter, with other fields in its configuration; returns the folder."""
    adapter_files.write(found, str(folder))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return folder


def assert_read(folder, expected):
    found = adapter_files.read(str(folder))
    assert found.tensors.keys() == expected.tensors.keys() and found.alphas == expected.alphas
    for key, array in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[key], array)


def test_the_first_weight_is_in_the_base_layer_of_the_second(tmp_path):
    found = adapter()
    tensors = load_file(written(tmp_path / "adapter", found) / "adapter_model.safetensors")
    experts = {key: array for key, array in tensors.items() if "experts" in key}
    assert experts.keys() == {f"{PREFIX}{base}.lora_{half}.weight" for base in ("", ".base_layer") for half in "AB"}
    for leaf, base in (("weight1", ".base_layer"), ("weight2", "")):
        a, b = (found.tensors[f"{HOLDER}.{leaf}", half] for half in "AB")
        flat_a, flat_b = (experts[f"{PREFIX}{base}.lora_{half}.weight"] for half in "AB")
        np.testing.assert_array_equal(flat_a, np.concatenate(list(a)))
        for expert, k in np.ndindex(EXPERTS, RANK):
            np.testing.assert_array_equal(flat_b[:, k * EXPERTS + expert], b[expert, :, k])
    assert_read(tmp_path / "adapter", found)


@pytest.mark.parametrize("leaf", SIZES)
def test_one_weight_alone_has_no_base_layer(tmp_path, leaf):
    tensors = load_file(written(tmp_path / "adapter", adapter(leaf)) / "adapter_model.safetensors")
    assert not any("base_layer" in key for key in tensors) and f"{PREFIX}.lora_A.weight" in tensors
    assert_read(tmp_path / "adapter", adapter(leaf))


def test_the_configuration_names_parameters_and_modules_apart(tmp_path):
    folder = written(tmp_path / "adapter", adapter(ranks={"weight2": 5}, dropout=0.1))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]
    assert config["target_parameters"] == [f"{HOLDER}.down_proj", f"{HOLDER}.gate_up_proj"]
    assert config["rank_pattern"] == {f"{HOLDER}.down_proj": 5} and config["r"] == RANK
    # PEFT refuses to load a dropout on parameters.
    assert config["lora_dropout"] == 0
    assert_read(folder, adapter(ranks={"weight2": 5}))


@pytest.mark.parametrize(
    "targets",
    [
        ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        ["down_proj", "gate_up_proj"],
        ["experts.gate_up_proj", f"{HOLDER}.down_proj", "q_proj.weight"],
    ],
)
def test_parameters_can_be_named_by_any_end(tmp_path, targets):
    assert_read(written(tmp_path / "adapter", adapter(), target_parameters=targets), adapter())


# Refusals -----------------------------------------------------------------------------------------------------------


def refused(folder, error, message):
    with pytest.raises(error) as found:
        adapter_files.read(str(folder))
    assert message in str(found.value)


def test_tensors_of_other_parameters_than_named_are_refused(tmp_path):
    folder = written(tmp_path / "adapter", adapter(), target_parameters=["experts.down_proj"])
    refused(folder, AdapterFormatError, f"target_parameters names {HOLDER}.down_proj, for which the file would hold")
    folder = written(tmp_path / "one", adapter("weight2"), target_parameters=["experts.down_proj", "gate_up_proj"])
    refused(folder, AdapterFormatError, f"and it holds {HOLDER}. Save the adapter with PEFT again")


def test_a_lost_half_is_missing(tmp_path):
    folder = written(tmp_path / "adapter", adapter())
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[f"{PREFIX}.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")
    refused(folder, MissingTensorsError, f"lacks half of 1 pairs: it holds {HOLDER}.weight2 A without")


@pytest.mark.parametrize(
    "half, shape, error, message",
    [
        ("A", (7, 4), ShapeMismatchError, "A of model.layers.0.mlp.experts.weight2 is [7, 4], which does not divide"),
        ("B", (5, 9), ShapeMismatchError, "B of model.layers.0.mlp.experts.weight2 is [5, 9], which does not divide"),
        ("A", (3, 2, 4), ShapeMismatchError, "is [3, 2, 4], which does not divide into experts of rank 2"),
        ("A", (8, 4), ShapeMismatchError, "A is of 4 experts and B of 3, at model.layers.0.mlp.experts.weight2"),
        ("A", (0, 4), ShapeMismatchError, "is [0, 4], which does not divide into experts of rank 2"),
    ],
)
def test_shapes_that_are_no_experts_are_refused(tmp_path, half, shape, error, message):
    folder = written(tmp_path / "adapter", adapter())
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"{PREFIX}.lora_{half}.weight"] = np.ones(shape, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    refused(folder, error, message)


def test_several_parameters_of_unknown_order_are_not_written(tmp_path):
    found = adapter()
    for half in "AB":
        found.tensors[f"{HOLDER}.extra", half] = found.tensors[f"{HOLDER}.weight2", half]
    found.alphas[f"{HOLDER}.extra"] = 3.0
    with pytest.raises(AdapterError, match="in the order in which the module declares them, but that is not known for"):
        adapter_files.write(found, str(tmp_path / "adapter"))


def test_a_declared_rank_that_does_not_fit_is_refused(tmp_path):
    # Three experts of rank 2 are also two of rank 3, but then q_proj's rank is another.
    folder = written(tmp_path / "adapter", adapter("weight2"), r=3)
    refused(folder, RankMismatchError, "declares rank 3 and the tensors have 2, at model.layers.0.attention.wq")
