"""What --base FOLDER|YAML says of a model, what it lacks, and the flags in whose place it has come."""

import json
import os

import numpy as np
import pytest
import yaml

from mindlora import cli
from mindlora.cli.base_model import read_base_model
from mindlora.core.errors import ConfigError
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads
from mindlora.models.architectures.joined_rows import PartAfterPart, QueryKeyValueInTurn
from tests.conftest import ROOT

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, RANK = 4, 2, 3, 8, 2
FOLDER = {"model_type": "qwen3", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
LEGACY = {"type": "LlamaConfig", "num_heads": HEADS, "n_kv_heads": KV_HEADS}
CELLS = {"attention.wq": HEADS, "attention.wk": KV_HEADS, "attention.wv": KV_HEADS}
CONTIGUOUS = {"use_contiguous_weight_layout_attention": True, "use_interleaved_weight_layout_mlp": False}


def write_base(folder, name, content):
    """Writes a folder with a config.json, or a YAML; returns its path."""
    path = folder / name
    if name.endswith(".yaml"):
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
    else:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def write_adapter(folder):
    """Writes an adapter of q, k and v, whose base nothing names; returns its path."""
    rng, adapter = np.random.default_rng(0), Adapter({})
    for cell, heads in CELLS.items():
        path = f"model.layers.0.{cell}"
        adapter.tensors[path, "A"] = rng.normal(size=(RANK, HIDDEN)).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(heads * HEAD_DIM, RANK)).astype(np.float32)
        adapter.alphas[path] = 6.0
    adapter_files.write(adapter, str(folder / "in"), "peft")
    return str(folder / "in")


@pytest.mark.parametrize(
    "name, content, heads, model_type",
    [
        ("base", FOLDER, Heads(HEADS, KV_HEADS, HEAD_DIM), "qwen3"),
        ("base", {"model_type": "deepseek_v3", "num_attention_heads": 4, "q_lora_rank": 6}, Heads(4, 4, None, 6), None),
        ("run.yaml", {"model": {"model_config": LEGACY}}, Heads(HEADS, KV_HEADS), "llama"),
        ("run.yaml", {"model": {"model_config": {**LEGACY, "qkv_has_bias": True}}}, Heads(HEADS, KV_HEADS), "qwen2"),
        (
            "run.yaml",
            {"use_legacy": False, "model": {"model_config": FOLDER}},
            Heads(HEADS, KV_HEADS, HEAD_DIM),
            "qwen3",
        ),
        ("run.yaml", {"training": {}, "lora_config": {}, "model": FOLDER}, Heads(HEADS, KV_HEADS, HEAD_DIM), "qwen3"),
        ("run.yaml", {"model": {"model_config": {"type": "MyConfig", "num_heads": 4}}}, Heads(4, 4), None),
    ],
    ids=["folder", "of DeepSeek-V3", "legacy", "with biases", "mcore", "pynative", "unknown"],
)
def test_a_folder_and_each_kind_of_yaml_say_sizes_and_kind(tmp_path, name, content, heads, model_type):
    found = read_base_model(write_base(tmp_path, name, content))
    assert found.heads == heads and found.config["model_type"] == (model_type or content.get("model_type"))


def test_a_yaml_reads_the_folder_that_it_names_and_the_order_of_joined_rows(tmp_path):
    folder = write_base(tmp_path, "base", FOLDER)
    content = {"use_legacy": False, "pretrained_model_dir": folder, "model": {"model_config": CONTIGUOUS}}
    found = read_base_model(write_base(tmp_path, "run.yaml", content))
    assert (found.heads.heads, found.heads.kv_heads, found.heads.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert {cell: type(layout) for cell, layout in found.heads.layouts.items()} == {
        "w_qkv": QueryKeyValueInTurn,
        "w_gate_hidden": PartAfterPart,
    }


def test_our_own_yamls_are_read():
    for path, sizes in {"llama3/lora_llama3_8b.yaml": (32, 8), "qwen3/lora_qwen3_8b.yaml": (32, 8)}.items():
        heads = read_base_model(os.path.join(ROOT, "configs", path)).heads
        assert (heads.heads, heads.kv_heads) == sizes


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("base", {"model_type": "qwen3"}, "lacks num_attention_heads. Name the folder"),
        ("run.yaml", {"model": {"model_config": {"n_kv_heads": 2}}}, "lacks num_heads or num_attention_heads"),
        ("run.yaml", {"model": {}}, "has no model.model_config"),
    ],
)
def test_what_is_lacking_is_named(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message):
        read_base_model(write_base(tmp_path, name, content))


@pytest.mark.parametrize("name, message", [("nowhere.yaml", "cannot be read"), (".", "has no config.json")])
def test_what_is_not_there_is_named(tmp_path, name, message, capsys):
    words = ["adapter", "convert", write_adapter(tmp_path), str(tmp_path / "out.safetensors"), "--to", "mcore"]
    assert cli.main([*words, "--base", str(tmp_path / name)]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out.safetensors").exists()


def test_the_flags_before_it_do_the_same_and_say_what_takes_their_place(tmp_path, capsys):
    words = ["adapter", "convert", write_adapter(tmp_path)]
    base = ["--base", write_base(tmp_path, "base", FOLDER)]
    flags = ["--heads", "4", "--kv-heads", "2", "--head-dim", "3", "--architecture", "qwen3"]
    assert cli.main([*words, str(tmp_path / "a.safetensors"), "--to", "mcore", *base]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main([*words, str(tmp_path / "b.safetensors"), "--to", "mcore", *flags, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["form"] == "mcore"
    assert printed.err == (
        '"--heads --kv-heads --head-dim --architecture" is given as "--base FOLDER|YAML" now, the base model\'s folder '
        "or YAML; the earlier form goes with the next version.\n"
    )
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize(
    "words", ["adapter convert", "adapter gather", "adapter scatter", "base convert", "base merge"]
)
def test_the_help_has_none_of_the_flags_before_it(words, capsys):
    with pytest.raises(SystemExit):
        cli.main([*words.split(), "--help"])
    shown = capsys.readouterr().out
    assert "FOLDER|YAML" in shown
    assert not [flag for flag in ("--heads", "--kv-heads", "--head-dim", "--q-lora", "--architecture") if flag in shown]


def test_the_order_of_joined_rows_is_that_of_the_yaml(tmp_path):
    source, joined, back = write_adapter(tmp_path), str(tmp_path / "m.safetensors"), str(tmp_path / "back")
    content = {"use_legacy": False, "model": {"model_config": {**FOLDER, **CONTIGUOUS}}}
    base = ["--base", write_base(tmp_path, "run.yaml", content)]
    assert cli.main(["adapter", "convert", source, joined, "--to", "mcore", *base]) == 0
    adapter = adapter_files.read(source)
    with TensorFile(joined) as file:
        delta = file.read("decoder.layers.0.self_attention.linear_qkv.lora_B.weight") @ file.read(
            "decoder.layers.0.self_attention.linear_qkv.lora_A.weight"
        )
    order = [f"model.layers.0.{cell}" for cell in CELLS]
    expected = np.concatenate([adapter.tensors[path, "B"] @ adapter.tensors[path, "A"] for path in order])
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-6)
    assert cli.main(["adapter", "convert", joined, back, "--to", "peft", *base]) == 0
    found = adapter_files.read(back)
    for key, array in adapter.tensors.items():
        np.testing.assert_array_equal(found.tensors[key], array)
