"""Merging into a GGUF file, read with the package gguf; tests/peers/test_llama_cpp.py has llama.cpp compute with it."""

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mindlora import cli
from mindlora.core.errors import CheckpointError, LoraError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.base.merge import merge_checkpoint

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 6,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
}
SHAPES = {
    "model.embed_tokens.weight": (6, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.mlp.down_proj.weight": (64, 40),
    "model.norm.weight": (64,),
    "lm_head.weight": (6, 64),
}


@pytest.fixture
def base(tmp_path):
    """A folder with some tensors of a Qwen2, and a tokenizer of six tokens, two of them added."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|eos|>", "chat_template": [{"name": "default", "template": "{{ messages }}"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


@pytest.fixture
def adapter(tmp_path):
    pair = Adapter({}, alphas={"model.layers.0.attention.wq": 4.0})
    pair.tensors["model.layers.0.attention.wq", "A"] = np.full((2, 64), 0.25, np.float32)
    pair.tensors["model.layers.0.attention.wq", "B"] = np.full((64, 2), 0.5, np.float32)
    adapter_files.write(pair, str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def change(path, **values):
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


@pytest.mark.parametrize("outtype, kind", [("f32", "F32"), ("f16", "F16"), ("q8_0", "Q8_0")])
def test_weights_sizes_and_tokens_are_in_the_file(base, adapter, tmp_path, outtype, kind):
    output = tmp_path / "x.gguf"
    report = merge_checkpoint(str(base), str(adapter), str(output), outtype=outtype)
    assert (report.files, report.merged, report.bytes) == ((str(output),), 1, output.stat().st_size)
    reader = gguf.GGUFReader(output)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    expected = {
        "general.architecture": "qwen2",
        "qwen2.block_count": 1,
        "qwen2.attention.head_count_kv": 2,
        "qwen2.attention.key_length": 16,
        "qwen2.rope.freq_base": 500.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|eos|>", "<tool>", "[PAD5]"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 4, 5],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert {key: fields[key] for key in expected} == expected
    source = load_file(base / "model.safetensors")
    source["model.layers.0.self_attn.q_proj.weight"] = source["model.layers.0.self_attn.q_proj.weight"] + 0.5
    found = {tensor.name: tensor for tensor in reader.tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.0.attn_q.bias": "model.layers.0.self_attn.q_proj.bias",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    assert set(found) == set(names)
    for name, theirs in names.items():
        tensor = found[name]
        is_vector = source[theirs].ndim == 1
        # Its rows of 40 do not divide into blocks of 32.
        wanted = "F32" if is_vector else "F16" if outtype == "q8_0" and "down" in name else kind
        assert tensor.tensor_type.name == wanted
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(source[theirs].shape)
        tolerance = {"F32": 1e-6, "F16": 2e-3, "Q8_0": 0.02}[wanted]
        np.testing.assert_allclose(values, source[theirs], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "file, values, message",
    [
        ("config.json", {"model_type": "qwen3_moe"}, "holds a qwen3_moe, for which mindlora writes no GGUF file"),
        ("config.json", {"vocab_size": 4}, "has the token 4, but the model's vocab_size is 4"),
        (
            "config.json",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "mindlora writes no GGUF file with rope_type yarn",
        ),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and llama.cpp's qwen2 has silu alone"),
        ("tokenizer.json", {"model": {"type": "Unigram", "vocab": []}}, "is of type 'Unigram', and mindlora writes"),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}},
            "cuts texts in a way that mindlora does not know",
        ),
    ],
)
def test_what_has_no_place_in_the_file_is_refused(base, adapter, tmp_path, file, values, message):
    change(base / file, **values)
    with pytest.raises(LoraError, match=message):
        merge_checkpoint(str(base), str(adapter), str(tmp_path / "x.gguf"))
    assert not (tmp_path / "x.gguf").exists()


def test_the_context_ends_where_the_window_of_the_base_begins_to_slide(base, adapter, tmp_path, caplog):
    change(base / "config.json", use_sliding_window=True, sliding_window=8)
    merge_checkpoint(str(base), str(adapter), str(tmp_path / "x.gguf"))
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    assert fields["qwen2.context_length"].contents() == 8
    assert "a token attends to the last 8 (sliding_window), and llama.cpp's qwen2 attends to all" in caplog.text


def test_a_tensor_without_a_name_there_is_refused(base, adapter, tmp_path):
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.self_attn.gate.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="self_attn.gate.weight has no place in llama.cpp's qwen2"):
        merge_checkpoint(str(base), str(adapter), str(tmp_path / "x.gguf"))


def test_a_base_without_its_folder_or_tokenizer_is_refused(base, adapter, tmp_path):
    (base / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer.json, .* Save it again with transformers"):
        merge_checkpoint(str(base), str(adapter), str(tmp_path / "x.gguf"))
    (base / "config.json").unlink()
    with pytest.raises(CheckpointError, match="is not a model's folder from Hugging Face"):
        merge_checkpoint(str(base), str(adapter), str(tmp_path / "x.gguf"))


def test_a_weight_beyond_float16_is_refused_and_leaves_the_file_as_it_was(base, adapter, tmp_path):
    output = tmp_path / "x.gguf"
    output.write_text("before", encoding="utf-8")
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = 1e5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lm_head.weight is too large for float16"):
        merge_checkpoint(str(base), str(adapter), str(output), overwrite=True)
    assert output.read_text(encoding="utf-8") == "before"
    merge_checkpoint(str(base), str(adapter), str(output), overwrite=True, outtype="f32")
    assert gguf.GGUFReader(output).tensors


def test_the_command(base, adapter, tmp_path, capsys):
    start = ["base", "merge", "--base", str(base), "--adapter", str(adapter), "--output"]
    assert cli.main([*start, str(tmp_path / "x.gguf"), "--to", "gguf", "--outtype", "q8_0"]) == 0
    assert "tensors merged: 1" in capsys.readouterr().out
    assert cli.main([*start, str(tmp_path / "x"), "--to", "gguf"]) == 1
    assert "give one that ends in .gguf" in capsys.readouterr().err
    assert cli.main([*start, str(tmp_path / "x"), "--outtype", "f16"]) == 1
    assert "--outtype is for GGUF files" in capsys.readouterr().err
