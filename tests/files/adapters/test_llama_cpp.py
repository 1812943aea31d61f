"""Adapters as GGUF files, read with the package gguf; tests/peers/test_llama_cpp.py has llama.cpp load them."""

import json
import sys

import gguf
import numpy as np
import pytest

from mindlora import cli
from mindlora.core.errors import AdapterError, InstallationError, LoraError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, convert_adapter

FLOAT32 = np.dtype(np.float32)
LAYER = "model.layers.1"
# Legacy path -> [out, in], in a model of four heads with six elements, two of them for keys and values.
SIZES = {"attention.wq": (24, 8), "attention.wk": (12, 8), "attention.wo": (8, 24), "feed_forward.w1": (10, 8)}
NAMES = {
    "attention.wq": "blk.1.attn_q",
    "attention.wk": "blk.1.attn_k",
    "attention.wo": "blk.1.attn_output",
    "feed_forward.w1": "blk.1.ffn_gate",
}
HEADS = Heads(4, 2)


def write_adapter(path, dtype=FLOAT32, **fields):
    rng = np.random.default_rng(0)
    adapter = Adapter({}, **fields)
    for number, (leaf, (rows, columns)) in enumerate(SIZES.items()):
        rank = 2 + number
        for part, shape in {"A": (rank, columns), "B": (rows, rank)}.items():
            values = rng.normal(size=shape).astype(np.float32)
            adapter.tensors[f"{LAYER}.{leaf}", part] = from_float32(values, dtype)
        adapter.alphas[f"{LAYER}.{leaf}"] = 4.0
    adapter_files.write(adapter, str(path))
    return adapter_files.read(str(path))


def read_gguf(path):
    """Returns the file's keys and values, and name -> array."""
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return fields, {tensor.name: tensor.data for tensor in reader.tensors}


def by_position(rows, heads):
    """Returns the rows of q or k with those that are rotated together side by side, by their definition."""
    size = len(rows) // heads
    order = [head * size + half * size // 2 + n for head in range(heads) for n in range(size // 2) for half in (0, 1)]
    return rows[order]


@pytest.mark.parametrize("dtype", [FLOAT32, np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_every_pair_has_the_scale_and_the_rows_that_llama_cpp_reads(tmp_path, kind, dtype):
    adapter = write_adapter(tmp_path / "in", dtype, use_rslora=True, base_model="hub/name")
    report = convert_adapter(str(tmp_path / "in"), str(tmp_path / "x.gguf"), "gguf", heads=HEADS, architecture=kind)
    assert str(report).endswith("x.gguf (gguf): 4 pairs of rank 2, 3, 4, 5, lora_alpha 4.")
    fields, tensors = read_gguf(tmp_path / "x.gguf")
    assert (fields["general.type"], fields["adapter.type"]) == ("adapter", "lora")
    assert (fields["general.architecture"], fields["general.base_model.0.name"]) == (kind, "hub/name")
    alpha = fields["adapter.lora.alpha"]
    assert set(tensors) == {f"{name}.weight.lora_{half}" for name in NAMES.values() for half in "ab"}
    for leaf, name in NAMES.items():
        path = f"{LAYER}.{leaf}"
        a, b = (tensors[f"{name}.weight.lora_{half}"] for half in "ab")
        assert a.dtype == b.dtype == np.float32
        expected = adapter.delta(path)
        heads = {"attention.wq": 4, "attention.wk": 2}.get(leaf)
        if kind == "llama" and heads:
            expected = by_position(expected, heads)
        np.testing.assert_allclose(alpha / a.shape[0] * b @ a, expected, rtol=2e-6, atol=1e-6)


def test_a_pair_of_a_head_with_a_table_of_its_own_is_written_without_that(tmp_path):
    """PEFT saves lm_head.base_layer.weight beside the pair; llama.cpp has output.weight."""
    adapter = Adapter({("lm_head", "A"): np.ones((2, 5), np.float32), ("lm_head", "B"): np.ones((7, 2), np.float32)})
    adapter.alphas["lm_head"] = 2.0
    adapter.saved_modules["lm_head.weight"] = np.ones((7, 5), np.float32)
    adapter_files.write(adapter, str(tmp_path / "in"))
    report = convert_adapter(str(tmp_path / "in"), str(tmp_path / "x.gguf"), "gguf", architecture="qwen2")
    assert report.saved_modules == 0
    assert set(read_gguf(tmp_path / "x.gguf")[1]) == {f"output.weight.lora_{half}" for half in "ab"}


def test_the_command_needs_no_form_where_the_name_tells_it(tmp_path, capsys):
    base = tmp_path / "base"
    base.mkdir()
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_adapter(tmp_path / "in", base_model=str(base))
    assert cli.main(["adapter", "convert", str(tmp_path / "in"), str(tmp_path / "x.gguf")]) == 0
    assert "x.gguf (gguf): 4 pairs" in capsys.readouterr().out
    assert cli.main(["adapter", "convert", str(tmp_path / "in"), str(tmp_path / "x")]) == 1
    assert "whose form its name does not tell. Say which one to write: --to peft," in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "output, arguments, message",
    [
        ("x.safetensors", {"architecture": "llama"}, "writes a file that ends in .gguf"),
        ("x.gguf", {}, r"nothing tells it here.* \(--base\); there are GGUF files of llama, mistral, qwen2, qwen3"),
        ("x.gguf", {"architecture": "qwen3_moe"}, "The base is a qwen3_moe, for which mindlora writes no GGUF"),
        ("x.gguf", {"architecture": "llama", "heads": Heads()}, "rows, but the number of heads is not known"),
        ("x.gguf", {"architecture": "llama", "heads": Heads(5, 2)}, "It has 24 rows, but the number of heads is 5"),
        ("x.gguf", {"concatenate": True}, "no joined modules: leave concatenate .* out for format 'gguf'"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, output, arguments, message):
    write_adapter(tmp_path / "in")
    with pytest.raises(LoraError, match=message):
        convert_adapter(str(tmp_path / "in"), str(tmp_path / output), "gguf", **{"heads": HEADS, **arguments})
    assert not (tmp_path / output).exists()


@pytest.mark.parametrize("path", ["model.tok_embeddings", "lm_head"])
def test_a_pair_of_one_table_for_embedding_and_head_is_refused(tmp_path, path):
    base = tmp_path / "base"
    base.mkdir()
    config = {"model_type": "qwen2", "tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    adapter = Adapter({}, base_model=str(base), embeddings={path} - {"lm_head"})
    adapter.tensors[path, "A"] = np.ones((2, 7), np.float32)
    adapter.tensors[path, "B"] = np.ones((5, 2), np.float32)
    adapter.alphas[path] = 2.0
    adapter_files.write(adapter, str(tmp_path / "in"))
    with pytest.raises(AdapterError, match=f"It adapts {path}, and .* one table .* merge --to gguf"):
        convert_adapter(str(tmp_path / "in"), str(tmp_path / "x.gguf"), "gguf")


def test_without_the_package_gguf_its_name_is_told(tmp_path, monkeypatch):
    write_adapter(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InstallationError, match=r"needs gguf, which is not installed: pip install 'mindlora\[gguf\]'"):
        convert_adapter(str(tmp_path / "in"), str(tmp_path / "x.gguf"), "gguf", heads=HEADS, architecture="llama")
