"""save_lora: what is written, what is refused, and that the old adapter survives if saving fails."""

import json
import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file

from mindlora import LoRADense, LoraError, load_lora, save_lora
from mindlora.core.errors import NotFiniteError
from mindlora.network.base_fingerprint import base_fingerprint
from tests.support.networks import TinyModel, adapters, snapshot
from tests.support.saved_adapters import CONFIG, FORMS, WEIGHTS, key, network

# What is written ------------------------------------------------------------------------------------------------


def test_a_folder_holds_two_files_and_its_config_is_peft_s(tmp_path):
    path = tmp_path / "adapter"
    save_lora(network(["wq", "w2"], lora_dropout=0.1), str(path), base_model="meta-llama/Llama-2-7b")
    assert sorted(os.listdir(path)) == [CONFIG, WEIGHTS]
    assert json.loads((path / CONFIG).read_text()) == {
        "alpha_pattern": {},
        "base_model_name_or_path": "meta-llama/Llama-2-7b",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 3,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 2,
        "rank_pattern": {},
        "target_modules": ["down_proj", "q_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def test_cells_that_are_not_all_of_their_name_are_listed_by_their_paths(tmp_path):
    save_lora(network(["layers.0.attention.wq", "lm_head"]), str(tmp_path / "adapter"))
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config["target_modules"] == ["lm_head", "model.layers.0.self_attn.q_proj"]
    assert config["base_model_name_or_path"] is None


@pytest.mark.parametrize("param_init_type, dtype", [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_the_header_names_lora_tensors_alone(tmp_path, param_init_type, dtype):
    source = network(param_init_type=param_init_type)
    save_lora(source, str(tmp_path / "adapter"))
    raw = (tmp_path / "adapter" / WEIGHTS).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    metadata = header.pop("__metadata__")
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        key(layer, leaf, half): (dtype, shape)
        for layer in range(2)
        for leaf, half, shape in [
            ("q_proj", "A", [2, 6]),
            ("q_proj", "B", [6, 2]),
            ("k_proj", "A", [2, 6]),
            ("k_proj", "B", [4, 2]),
        ]
    }
    assert metadata["format"] == "pt"
    assert json.loads(metadata["mindlora"]) == {"base_fingerprint": base_fingerprint(source)}


def test_the_tensors_are_not_transposed(saved):
    a = network(seed=2).model.layers[1].attention.wk.mindpet_delta_lora_a
    np.testing.assert_array_equal(load_file(os.path.join(saved, WEIGHTS))[key(1, "k_proj", "A")], a.asnumpy())


def test_a_ckpt_holds_lora_tensors_under_mindformers_names_and_a_record_of_ours(saved_ckpt):
    content = ms.load_checkpoint(saved_ckpt)
    source = adapters(network(seed=2))
    assert content.keys() == {"mindlora_begin", *source, "mindlora"}
    for name, parameter in source.items():
        np.testing.assert_array_equal(content[name].asnumpy(), parameter.asnumpy())
    assert json.loads(str(content["mindlora"])) == {
        "alphas": {f"model.layers.{layer}.attention.{leaf}": 3.0 for layer in range(2) for leaf in ("wq", "wk")},
        "base_fingerprint": base_fingerprint(network(seed=2)),
        "base_model": None,
        "dropout": 0.0,
        "selection": {},
        "embeddings": [],
        "use_dora": False,
        "use_rslora": False,
        "whole": [],
    }


def test_mindspore_loads_a_ckpt_into_the_network(saved_ckpt):
    target = network()
    ms.load_checkpoint(saved_ckpt, target)
    assert snapshot(target) == snapshot(network(seed=2))


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form, name, message",
    [
        (
            "safetensors",
            "adapter",
            "format is 'safetensors', which is not known. "
            "Known: ckpt, diffusers, kohya, mcore, mindformers, peft, pynative, slora.",
        ),
        ("ckpt", "adapter", "path is 'adapter': format 'ckpt' writes a file that ends in .ckpt."),
        ("mindformers", "adapter", "path is 'adapter': format 'mindformers' writes a file that ends in .safetensors."),
        ("slora", "adapter.safetensors", "path is 'adapter.safetensors': format 'slora' writes a folder."),
        ("peft", "adapter.ckpt", "path is 'adapter.ckpt': format 'peft' writes a folder."),
    ],
)
def test_a_format_must_be_known_and_fit_the_path(tmp_path, form, name, message):
    with pytest.raises(LoraError) as error:
        save_lora(network(), name, format=form)
    assert str(error.value) == message and not os.listdir(tmp_path)


def test_a_folder_does_not_replace_a_file_nor_a_file_a_folder(tmp_path):
    (tmp_path / "adapter").write_text("mine")
    (tmp_path / "adapter.ckpt").mkdir()
    with pytest.raises(LoraError) as error:
        save_lora(network(), "adapter")
    assert str(error.value) == (
        "path is 'adapter', where there is a file, but format 'peft' writes a folder. Remove it, or give another path."
    )
    with pytest.raises(LoraError) as error:
        save_lora(network(), "adapter.ckpt", format="ckpt")
    assert str(error.value) == (
        "path is 'adapter.ckpt', where there is a folder, but format 'ckpt' writes a file. "
        "Remove it, or give another path."
    )
    assert (tmp_path / "adapter").read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["adapter", "adapter.ckpt"]


def test_without_adapters_there_is_nothing_to_save(tmp_path):
    with pytest.raises(LoraError) as error:
        save_lora(TinyModel(), str(tmp_path / "other"))
    assert str(error.value) == (
        "The network holds no LoRADense cell, so there is no adapter to save. Call apply_lora first."
    )
    assert not os.listdir(tmp_path)


def test_cells_that_scale_in_two_ways_do_not_go_into_one_file(tmp_path):
    source = nn.SequentialCell(LoRADense(6, 5, 2, 3), LoRADense(5, 4, 2, 3, use_rslora=True))
    with pytest.raises(LoraError) as error:
        save_lora(source, str(tmp_path / "adapter"))
    assert str(error.value) == (
        "Some cells of the network scale with use_rslora and some without, but an adapter has one setting. "
        "Apply LoRA with one setting of use_rslora."
    )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form, name", FORMS)
def test_nan_is_not_saved_and_the_old_adapter_stays(tmp_path, form, name, param_init_type, value):
    path = str(tmp_path / name)
    source = network(seed=2, param_init_type=param_init_type)
    save_lora(source, path, format=form)
    b = source.model.layers[1].attention.wk.mindpet_delta_lora_b
    values = np.ones(b.shape, np.float32)
    values[-1, -1] = value
    b.set_data(Tensor(values, b.dtype))
    with pytest.raises(NotFiniteError) as error:
        save_lora(source, path, format=form)
    assert str(error.value) == (
        "The network holds LoRA tensors with NaN or infinity, so nothing was saved: model.layers.1.attention.wk B. "
        "Load an earlier checkpoint, and lower the learning rate."
    )
    target = network(param_init_type=param_init_type)
    load_lora(target, path)
    assert snapshot(target) == snapshot(network(seed=2, param_init_type=param_init_type))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("form, name", FORMS)
def test_an_error_while_writing_leaves_the_old_adapter(tmp_path, monkeypatch, form, name):
    path = str(tmp_path / name)
    save_lora(network(seed=2), path, format=form)

    def full(*arguments, **keys):
        raise OSError("no space left on device")

    monkeypatch.setattr("mindlora.core.atomic._sync", full)
    with pytest.raises(OSError, match="no space left"):
        save_lora(network(seed=4), path, format=form)
    monkeypatch.undo()
    target = network()
    load_lora(target, path)
    assert snapshot(target) == snapshot(network(seed=2)) and os.listdir(tmp_path) == [name]
