"""merge_checkpoint: base + scale B A, verified, for every form of base and adapter, or nothing at all."""

import os
import subprocess
import sys

import numpy as np
import pytest

from mindlora import cli
from mindlora.core.errors import AdapterError, ScaleMismatchError
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from mindlora.files.base.reader import BaseCheckpoint
from tests.conftest import ROOT
from tests.support.llama_checkpoints import (
    CONFIG,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    assert_same,
    llama,
    load,
    save_base,
)
from tests.support.merged_checkpoints import ALPHA, DTYPES, LINEARS, RANK, Q, assert_merged, pairs, save_adapter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", ["hf", "mindformers"])
def test_what_is_written(tmp_path, monkeypatch, dtype, world):
    # Blocks of single rows, so that block borders are tested.
    monkeypatch.setattr("mindlora.files.base.writer._BLOCK", 1)
    source, found = llama(DTYPES[dtype]), pairs()
    base = save_base(tmp_path / "base", source, shards=3)
    if world == "mindformers":
        convert_base(base, str(tmp_path / "mf"), "hf", "mindformers")
        base = str(tmp_path / "mf")
    report = merge_checkpoint(base, save_adapter(tmp_path / "adapter", found), str(tmp_path / "out"))
    if world == "mindformers":
        convert_base(str(tmp_path / "out"), str(tmp_path / "back"), "mindformers", "hf")
    assert_merged(load(tmp_path / ("back" if world == "mindformers" else "out")), source, found)
    assert (report.merged, report.replaced, report.unchanged) == (14, 0, len(source) - 14)
    assert report.bytes == sum(array.nbytes for array in source.values()) and len(report.files) == 3
    assert 0 < report.difference <= report.bound and report.tensor in load(base)
    assert "tensors merged: 14" in str(report) and report.tensor in str(report)


@pytest.mark.parametrize("form", ["base.safetensors", "base.ckpt"])
def test_single_files(tmp_path, form):
    source, found = llama(), pairs(Q)
    save_base(tmp_path / "hf", source)
    convert_base(str(tmp_path / "hf"), str(tmp_path / form), None, "mindformers")
    adapter = save_adapter(tmp_path / "adapter", found)
    for output in ("out.safetensors", "out.ckpt", "out"):
        merge_checkpoint(str(tmp_path / form), adapter, str(tmp_path / output))
        convert_base(str(tmp_path / output), str(tmp_path / "back"), None, "hf", overwrite=True)
        assert_merged(load(tmp_path / "back"), source, found)


@pytest.mark.parametrize("bare_base", [True, False])
@pytest.mark.parametrize("bare_adapter", [True, False])
def test_a_bare_model_and_its_adapter(tmp_path, bare_base, bare_adapter):
    """Both are read as the model with a head has them, and so is what is written."""
    source, found = llama(), pairs()
    stored = {name.removeprefix("model.") if bare_base else name: array for name, array in source.items()}
    named = {path.removeprefix("model.") if bare_adapter else path: pair for path, pair in found.items()}
    base = save_base(tmp_path / "base", stored, shards=2)
    report = merge_checkpoint(base, save_adapter(tmp_path / "adapter", named), str(tmp_path / "out"))
    with BaseCheckpoint(str(tmp_path / "out")) as written:
        assert written.bare_prefix == ""
    assert_merged(load(tmp_path / "out"), source, found)
    assert any("a bare model's" in note for note in report.notes) == bare_base


def test_the_folder_is_complete_for_transformers(tmp_path):
    base = save_base(tmp_path / "base", llama(), tie_word_embeddings=False)
    for name in ("tokenizer.json", "generation_config.json", "notes.txt", "pytorch_model.bin"):
        (tmp_path / "base" / name).write_text(name)
    adapter = save_adapter(tmp_path / "adapter", pairs(Q))
    merge_checkpoint(base, adapter, str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "base" / "config.json").read_text()


def test_scales(tmp_path):
    source, found = llama(), pairs(Q)
    base = save_base(tmp_path / "base", source)
    merge_checkpoint(base, save_adapter(tmp_path / "rs", found, use_rslora=True), str(tmp_path / "out"))
    assert_merged(load(tmp_path / "out"), source, found, ALPHA / np.sqrt(RANK))
    name = "model.layers.0.attention.wq.mindpet_delta_lora_"
    write_arrays(str(tmp_path / "mf.safetensors"), {name + "a": found[Q][0], name + "b": found[Q][1]})
    with pytest.raises(ScaleMismatchError, match="lora_alpha"):
        merge_checkpoint(base, str(tmp_path / "mf.safetensors"), str(tmp_path / "out2"))
    merge_checkpoint(base, str(tmp_path / "mf.safetensors"), str(tmp_path / "out2"), lora_alpha=2.0)
    assert_merged(load(tmp_path / "out2"), source, found, 2.0 / RANK)
    with pytest.raises(ScaleMismatchError, match="lora_alpha is 2, but the adapter has its own: 6"):
        merge_checkpoint(base, str(tmp_path / "rs"), str(tmp_path / "out3"), lora_alpha=2.0)
    assert not (tmp_path / "out3").exists()


def test_saved_modules_replace_those_of_the_base(tmp_path):
    source, found = llama(), pairs(Q)
    saved_modules = {"lm_head.weight": np.full((VOCAB, HIDDEN), 1.5, np.float32)}
    report = merge_checkpoint(
        save_base(tmp_path / "base", source),
        save_adapter(tmp_path / "adapter", found, saved_modules),
        str(tmp_path / "out"),
    )
    assert_merged(
        load(tmp_path / "out"),
        {**source, "lm_head.weight": from_float32(saved_modules["lm_head.weight"], BFLOAT16)},
        found,
    )
    assert (report.merged, report.replaced, report.unchanged) == (1, 1, len(source) - 2)


@pytest.mark.parametrize("names", [LINEARS, ["self_attn.v_proj", "mlp.up_proj"], ["self_attn.q_proj"]])
def test_an_adapter_of_parts_on_a_joined_base(tmp_path, names):
    source, found = llama(DTYPES["float32"]), pairs(*[f"model.layers.1.{name}" for name in names])
    save_base(tmp_path / "hf", source, **CONFIG)
    convert_base(str(tmp_path / "hf"), str(tmp_path / "joined"), None, "mindformers", concat=True)
    adapter = save_adapter(tmp_path / "adapter", found)
    merge_checkpoint(str(tmp_path / "joined"), adapter, str(tmp_path / "out"), kv_heads=KV_HEADS)
    convert_base(str(tmp_path / "out"), str(tmp_path / "back"), None, "hf", heads=HEADS, kv_heads=KV_HEADS)
    assert_merged(load(tmp_path / "back"), source, found)
    with pytest.raises(AdapterError, match="YAML .--base, or --config of base merge"):
        merge_checkpoint(str(tmp_path / "joined"), adapter, str(tmp_path / "out2"))
    command = ["base", "merge", "--base", str(tmp_path / "joined"), "--adapter", adapter, "--output"]
    for name, options in (
        ("by config", ["--config", str(tmp_path / "hf")]),
        ("by flag", ["--kv-heads", str(KV_HEADS)]),
    ):
        assert cli.main([*command, str(tmp_path / name), *options]) == 0
        assert_same(load(tmp_path / name), load(tmp_path / "out"))
    with pytest.raises(AdapterError, match="5 heads do not divide the 32, 16, 16 rows of q, k, v"):
        merge_checkpoint(str(tmp_path / "joined"), adapter, str(tmp_path / "out2"), kv_heads=5)
    assert not (tmp_path / "out2").exists()


def test_a_joined_adapter_on_a_base_of_parts(tmp_path):
    source = llama(DTYPES["float32"])
    base = save_base(tmp_path / "hf", source, shards=2)
    rng, tensors = np.random.default_rng(3), {}
    for name, rows in (("attention.w_qkv", 64), ("feed_forward.w_gate_hidden", 2 * FFN)):
        path = f"model.layers.0.{name}.mindpet_delta_lora_"
        tensors[path + "a"] = rng.normal(size=(RANK, HIDDEN)).astype(np.float32)
        tensors[path + "b"] = rng.normal(size=(rows, RANK)).astype(np.float32)
    write_arrays(str(tmp_path / "joint.safetensors"), tensors)
    delta = {
        name: tensors[f"model.layers.0.{name}.mindpet_delta_lora_b"]
        for name in ("attention.w_qkv", "feed_forward.w_gate_hidden")
    }
    groups = delta["attention.w_qkv"].reshape(KV_HEADS, 4 * HEAD_DIM, RANK)
    a = {name: tensors[f"model.layers.0.{name}.mindpet_delta_lora_a"] for name in delta}
    found = {
        Q: (a["attention.w_qkv"], groups[:, :16].reshape(-1, RANK)),
        "model.layers.0.self_attn.k_proj": (a["attention.w_qkv"], groups[:, 16:24].reshape(-1, RANK)),
        "model.layers.0.self_attn.v_proj": (a["attention.w_qkv"], groups[:, 24:].reshape(-1, RANK)),
        "model.layers.0.mlp.gate_proj": (a["feed_forward.w_gate_hidden"], delta["feed_forward.w_gate_hidden"][::2]),
        "model.layers.0.mlp.up_proj": (a["feed_forward.w_gate_hidden"], delta["feed_forward.w_gate_hidden"][1::2]),
    }
    report = merge_checkpoint(
        base, str(tmp_path / "joint.safetensors"), str(tmp_path / "out"), lora_alpha=ALPHA, kv_heads=KV_HEADS
    )
    assert_merged(load(tmp_path / "out"), source, found)
    assert report.merged == 5
    with pytest.raises(AdapterError, match="YAML .--base, or --config of base merge"):
        merge_checkpoint(base, str(tmp_path / "joint.safetensors"), str(tmp_path / "out2"), lora_alpha=ALPHA)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of memory")
def test_memory_is_that_of_a_few_blocks(tmp_path):
    shape, rng = (16384, 4096), np.random.default_rng(0)
    os.makedirs(tmp_path / "base")
    write_arrays(
        str(tmp_path / "base" / "model.safetensors"), {f"{Q}.weight": np.zeros(shape, np.uint16).view(BFLOAT16)}
    )
    adapter = save_adapter(
        tmp_path / "adapter",
        {
            Q: (
                rng.normal(size=(RANK, shape[1])).astype(np.float32),
                rng.normal(size=(shape[0], RANK)).astype(np.float32),
            )
        },
    )
    code = (
        "from mindlora.files.base.merge import merge_checkpoint\n"
        "def peak(): return next(int(line.split()[1]) for line in open('/proc/self/status') if 'VmHWM' in line)\n"
        f"before = peak(); merge_checkpoint({str(tmp_path / 'base')!r}, {adapter!r}, {str(tmp_path / 'out')!r})\n"
        "print(peak() - before)"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT, "OPENBLAS_NUM_THREADS": "1"}
    used = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    # In KiB; the one tensor has 128 MiB.
    assert int(used.stdout) < 100 * 1024


def test_an_embedding_and_a_head_that_are_equal_replace_the_one_table_of_a_tied_base(tmp_path):
    """PEFT's ensure_weight_tying."""
    source, found = llama(DTYPES["float32"], tied=True), pairs(Q)
    table = np.random.default_rng(5).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    saved = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    adapter = save_adapter(tmp_path / "adapter", found, saved, ensure_weight_tying=True)
    base = save_base(tmp_path / "base", source, tie_word_embeddings=True)
    report = merge_checkpoint(base, adapter, str(tmp_path / "out"))
    assert (report.merged, report.replaced) == (1, 1)
    assert_merged(load(tmp_path / "out"), {**source, "model.embed_tokens.weight": table}, found)
