"""VeRA's vectors and matrices: in files of every format, matched to networks, merged and compared."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora import (
    LoraConfig,
    apply_lora,
    combine_adapters,
    compare_adapters,
    convert_adapter,
    inspect_adapter,
    load_lora,
    save_lora,
)
from mindlora.core.errors import (
    AdapterError,
    AdapterFormatError,
    MissingTensorsError,
    ShapeMismatchError,
    UnexpectedTensorsError,
)
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.convert import Heads
from mindlora.files.adapters.dialects import mindformers, peft
from mindlora.files.base.merge import merge_checkpoint
from mindlora.models.variants.vera import VERA
from mindlora.network.merge import merge_lora
from mindlora.network.tree import lora_cells
from mindlora.network.variants.vera import VeRADense
from tests.support.adapter_samples import CONFIG, WEIGHTS, K, Q, make
from tests.support.networks import TinyModel, as_array, randomize
from tests.support.refusals import refused

PATHS = {"peft": "adapter", "mindformers": "adapter.safetensors", "ckpt": "adapter.ckpt"}
W2 = "model.layers.0.feed_forward.w2"
VECTOR = "base_model.model.model.layers.{}.self_attn.q_proj.vera_lambda_{}"


def model(use_vera=True, seed=1, targets=("wq", "w2"), key=3):
    """A network whose base is the same for each seed, with normal vectors; wq is [6, 6], w2 [6, 9]."""
    network = TinyModel()
    randomize(network.get_parameters(), seed=5)
    options = {"use_vera": True, "projection_prng_key": key, "lora_dropout": 0.25} if use_vera else {}
    apply_lora(network, LoraConfig(lora_rank=2, target_modules=list(targets), **options))
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed)
    return network


def saved(path, **options):
    save_lora(model(**options), str(path))
    return str(path)


def rewritten(path, change=None, **fields):
    """An adapter of two cells, whose tensors and configuration were changed after it was saved."""
    saved(path, targets=["wq"])
    config = {**json.loads((path / CONFIG).read_text()), **fields}
    (path / CONFIG).write_text(json.dumps(config))
    if change:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS)
    return str(path)


# Networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PATHS)
@pytest.mark.parametrize("bare", [True, False])
def test_saved_and_loaded(form, bare, tmp_path):
    source, path = model(), str(tmp_path / PATHS[form])
    save_lora(source, path, form)
    target = TinyModel() if bare else model(seed=2, key=4)
    if bare:
        randomize(target.get_parameters(), seed=5)
    load_lora(target, path, on_base_mismatch="error")
    pairs = list(zip(lora_cells(target), lora_cells(source)))
    assert len(pairs) == 4
    for (_, mine), (_, other) in pairs:
        assert type(mine) is VeRADense and (mine.projection_key == 3 or not bare)
        for parts in ("parts", "shared_parts"):
            found, expected = getattr(mine, parts)(), getattr(other, parts)()
            assert found.keys() == expected.keys() and len(found) == 2
            for part, parameter in found.items():
                np.testing.assert_array_equal(parameter.asnumpy(), expected[part].asnumpy())
                assert parameter.name == expected[part].name
    save_lora(target, str(tmp_path / "again"))
    save_lora(source, str(tmp_path / "peft"))
    assert compare_adapters(str(tmp_path / "again"), str(tmp_path / "peft")).equal


def test_peft_s_keys_and_configuration(tmp_path):
    saved(tmp_path / "a", targets=["wq"])
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    assert {key: array.shape for key, array in tensors.items()} == {
        "base_model.vera_A": (2, 6),
        "base_model.vera_B": (6, 2),
        **{VECTOR.format(layer, part): shape for layer in (0, 1) for part, shape in (("d", (2,)), ("b", (6,)))},
    }
    assert json.loads((tmp_path / "a" / CONFIG).read_text()) == {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "peft_type": "VERA",
        "projection_prng_key": 3,
        "r": 2,
        "save_projection": True,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "vera_dropout": 0.25,
    }
    for key in ((Q, "lambda_d"), (Q, "lambda_b"), ("", "shared A"), ("", "shared B")):
        assert peft.parse_key(peft.tensor_key(*key)) == key
        assert mindformers.parse_key(mindformers.tensor_key(*key)) == key
    # If MindSpore saves the whole network, it may name the shared parameter after its first cell.
    assert mindformers.parse_key(f"{Q}.mindpet_delta_lora_vera_a") == ("", "shared A")


@pytest.mark.parametrize("trained", [True, False])
def test_vera_and_lora_are_told_apart(trained, tmp_path):
    path = saved(tmp_path / "a", use_vera=trained)
    refused(
        UnexpectedTensorsError if trained else MissingTensorsError,
        f"{path} was trained with use_vera {trained}, but the network was built with {not trained}, at "
        "model.layers.{0..1}.feed_forward.w2, model.layers.{0..1}.attention.wq: set use_vera to "
        f"{trained}.",
        load_lora,
        model(not trained),
        path,
    )


def test_wider_matrices_than_the_network_s_are_cut(tmp_path):
    """With strict=False, a network takes from an adapter of more cells what its own cells need."""
    path, network = saved(tmp_path / "a"), model(targets=["wq"], seed=2, key=9)
    load_lora(network, path, strict=False)
    expected = model()
    for path, mine in lora_cells(network):
        other = dict(lora_cells(expected))[path]
        for found, array in zip(mine.pair(), other.pair()):
            np.testing.assert_array_equal(found, array)


# Files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PATHS)
def test_every_form_says_the_same(form, tmp_path):
    path = str(tmp_path / PATHS[form])
    save_lora(model(), path, form)
    adapter = adapter_files.read(path)
    assert adapter.variant is VERA and (adapter.projection_key, adapter.dropout) == (3, 0.25)
    assert {(adapter.scale(path), adapter.rank(path)) for path in adapter.paths} == {(1, 2)}
    assert list(adapter.parts(W2)) == ["A", "B", "lambda_d", "lambda_b"]
    for path in adapter.paths:  # A is the widest cell's in all
        assert adapter.tensors[path, "A"].shape == (2, 9)


def test_conversion_and_back(tmp_path):
    saved(tmp_path / "a")
    convert_adapter(str(tmp_path / "a"), str(tmp_path / "b.ckpt"), "ckpt")
    convert_adapter(str(tmp_path / "b.ckpt"), str(tmp_path / "c"), "peft")
    one, two = (load_file(tmp_path / name / WEIGHTS) for name in "ac")
    assert one.keys() == two.keys() and all(array.tobytes() == two[key].tobytes() for key, array in one.items())
    for name in "ac":
        config = json.loads((tmp_path / name / CONFIG).read_text())
        assert (config["peft_type"], config["projection_prng_key"]) == ("VERA", 3)
    refused(
        AdapterError,
        "slora does not serve VeRA vectors (use_vera). Merge the adapter into its base, or write format 'peft'.",
        convert_adapter,
        str(tmp_path / "a"),
        str(tmp_path / "d"),
        "slora",
    )


@pytest.mark.parametrize(
    "kind, message, change, fields",
    [
        (
            UnexpectedTensorsError,
            ": use_vera is False, but the adapter has VeRA vectors. Use the tensors and the configuration of one save.",
            None,
            {
                "peft_type": "LORA",
                "lora_alpha": 2,
                **dict.fromkeys(("projection_prng_key", "save_projection", "vera_dropout")),
            },
        ),
        (
            AdapterFormatError,
            "/adapter_config.json: save_projection is False, so VeRA's matrices A and B are not in the file. "
            "Save the adapter with save_projection: true.",
            None,
            {"save_projection": False},
        ),
        (AdapterFormatError, "/adapter_config.json: r is 0; it must be a whole number of at least 1.", None, {"r": 0}),
        (
            MissingTensorsError,
            "/adapter_model.safetensors holds VeRA's vectors but lacks A of the shared projection. "
            "Save the adapter with it (save_projection: true).",
            lambda tensors: tensors.pop("base_model.vera_A"),
            {},
        ),
        (
            MissingTensorsError,
            " has a lambda_d at some cells but none at model.layers.0.attention.wq. Copy or save the adapter again.",
            lambda tensors: tensors.pop(VECTOR.format(0, "d")),
            {},
        ),
        (
            ShapeMismatchError,
            ": the lambda_d is [3] and must be [r], at model.layers.0.attention.wq (A [2, 6], B [6, 2]). Save the "
            "adapter again with the program that trained it.",
            lambda tensors: tensors.update({VECTOR.format(0, "d"): np.ones(3, np.float32)}),
            {},
        ),
        (
            ShapeMismatchError,
            "/adapter_model.safetensors: lambda_b of model.layers.0.attention.wq has 7 elements, but the "
            "shared B is [6, 2]: it has too few rows. Save the adapter again, with its own projection.",
            lambda tensors: tensors.update({VECTOR.format(0, "b"): np.ones(7, np.float32)}),
            {},
        ),
    ],
)
def test_tensors_that_do_not_belong_together(kind, message, change, fields, tmp_path):
    path = rewritten(tmp_path / "a", change, **fields)
    refused(kind, path + message, adapter_files.read, path)


def test_all_vectors_lost(tmp_path):
    path = str(tmp_path / "adapter.safetensors")
    save_lora(model(), path, "mindformers")
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        metadata, keys = file.metadata(), list(file.keys())
        save_file({key: file.get_tensor(key) for key in keys if "lambda" not in key}, path, metadata)
    with pytest.raises(MissingTensorsError, match="lacks the VeRA vectors that mindlora's metadata in it names."):
        adapter_files.read(path)


def test_combining_is_refused(tmp_path):
    adapter = adapter_files.read(saved(tmp_path / "a"))
    refused(
        AdapterError,
        "Adapter 2 is a VeRA adapter (use_vera), which cannot be combined: its cells share A and B, which are as wide "
        "as the widest cell. Merge the adapters into the base one after the other instead.",
        combine_adapters,
        [make(), adapter],
        [1, 1],
        "cat",
    )


def test_joining_is_refused(tmp_path):
    saved(tmp_path / "a", targets=["wq", "wk", "wv"])
    refused(
        AdapterError,
        "model.layers.0.attention.w_qkv joins model.layers.0.attention.wq, "
        "model.layers.0.attention.wk, model.layers.0.attention.wv, and VeRA's vectors belong to rows of matrices "
        "that all cells share: such pairs can be neither joined nor split. Build the model with qkv_concat as it was "
        "trained.",
        convert_adapter,
        str(tmp_path / "a"),
        str(tmp_path / "b.ckpt"),
        "ckpt",
        heads=Heads(3, 2, 2),
        concatenate=True,
    )


# Merging and comparing ------------------------------------------------------------------------------------------


def test_a_checkpoint_is_merged_as_a_network_is(tmp_path):
    network = model()
    base = {p.name: p.asnumpy() for p in network.get_parameters() if "lora" not in p.name}
    save_file(base, tmp_path / "base.safetensors")
    save_lora(network, str(tmp_path / "a"))
    merge_checkpoint(str(tmp_path / "base.safetensors"), str(tmp_path / "a"), str(tmp_path / "merged.safetensors"))
    merge_lora(network)
    merged = load_file(tmp_path / "merged.safetensors")
    for parameter in network.get_parameters():
        if parameter.name in base:
            np.testing.assert_allclose(
                merged[parameter.name], as_array(parameter), rtol=1e-6, atol=1e-6, err_msg=parameter.name
            )
    for path in (Q, W2):
        assert np.abs(merged[f"{path}.weight"] - base[f"{path}.weight"]).max() > 0.1


def test_the_inspection_of_it(tmp_path):
    path = saved(tmp_path / "a", targets=["wq"])
    report = inspect_adapter(path)
    assert report.variant == "VeRA" and (report.tensors, report.parameters) == (6, 12 + 12 + 2 * 8)
    assert "all cells share A and B" in str(report) and not report.warnings
    delta = adapter_files.read(path).delta(Q)
    assert report.cells[0].norm_delta == pytest.approx(np.linalg.norm(delta), rel=1e-5)
    other = saved(tmp_path / "b", targets=["wq"], seed=2)
    diff = compare_adapters(path, other)
    assert not diff.equal and diff.cells[0].difference_delta > 0 and not diff.settings
    lora = tmp_path / "lora"
    adapter_files.write(make({Q: 2, K: 2}), str(lora))
    assert compare_adapters(path, str(lora)).settings["VeRA"] == ("yes", "no")
