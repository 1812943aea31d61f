"""What gather and scatter take from a YAML to tell apart what the cells of an mcore run have joined."""

import json

import numpy as np
import pytest
import yaml

from mindlora.cli import main
from mindlora.core.errors import AdapterError
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.adapters.sharding.gather import gather_adapter
from mindlora.files.adapters.sharding.run_settings import RunSettings, heads_of
from mindlora.files.adapters.sharding.scatter import scatter_adapter
from tests.support import sharded_runs
from tests.support.refusals import part, refused
from tests.support.sharded_runs import Scheme

# The size of a head is not HIDDEN / HEADS, as in the smaller Qwen3.
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, RANK = 4, 2, 16, 32, 6, 3
ROWS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "gate": INNER, "up": INNER}
LEGACY = {
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
}
SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": HIDDEN}


def blocks():
    """B of each of Hugging Face's cells."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, RANK)).astype(np.float32) for name, rows in ROWS.items()}


def write_run(folder, contiguous=False):
    """A run with one pair for linear_qkv and one for linear_fc1; returns (ranks, strategy, its tensors)."""
    own, rng = blocks(), np.random.default_rng(1)
    if contiguous:
        qkv, fc1 = [own[name] for name in "qkv"], [own["gate"], own["up"]]
    else:
        per_group = HEADS // KV_HEADS * HEAD_DIM
        qkv = [
            own[name][size * group : size * (group + 1)]
            for group in range(KV_HEADS)
            for name, size in (("q", per_group), ("k", HEAD_DIM), ("v", HEAD_DIM))
        ]
        fc1 = [own[name][row : row + 1] for row in range(INNER) for name in ("gate", "up")]
    whole = {}
    for cell, rows in (("self_attention.linear_qkv", qkv), ("mlp.linear_fc1", fc1)):
        name = f"decoder.layers.0.{cell}.mindpet_delta_lora"
        whole[f"{name}_a"] = rng.normal(size=(RANK, HIDDEN)).astype(np.float32)
        whole[f"{name}_b"] = np.concatenate(rows)
    scheme = Scheme(mp=2)
    strategy = sharded_runs.write_strategy(folder / "strategy", scheme, whole)
    return sharded_runs.write_ranks(folder / "checkpoint", scheme, whole), strategy, whole


def assert_apart(folder):
    adapter = files.read(str(folder))
    assert len(adapter.paths) == len(LEGACY)
    for name, block in blocks().items():
        np.testing.assert_array_equal(adapter.tensors[f"model.layers.0.{LEGACY[name]}", "B"], block)


@pytest.mark.parametrize(
    "model_config",
    [
        {**SIZES, "head_dim": HEAD_DIM},
        {**SIZES, "kv_channels": HEAD_DIM},
        {"n_kv_heads": KV_HEADS, "kv_channels": HEAD_DIM},
        SIZES,
        {"num_heads": HEADS, "n_kv_heads": KV_HEADS, "hidden_size": HIDDEN},
        {"num_attention_heads": HEADS, "num_query_groups": KV_HEADS, "hidden_size": HIDDEN, "head_dim": None},
    ],
    ids=str,
)
def test_the_sizes_of_the_attention_are_known_under_every_name_that_mindformers_takes(model_config, tmp_path):
    ranks, strategy, _ = write_run(tmp_path)
    settings = RunSettings(lora_alpha=6.0, heads=heads_of(model_config, Heads()))
    gather_adapter(ranks, str(tmp_path / "peft"), "peft", strategy, settings)
    assert_apart(tmp_path / "peft")


def test_the_rows_of_cells_one_after_the_other_are_told_apart_too_and_scatter_back(tmp_path):
    ranks, strategy, whole = write_run(tmp_path, contiguous=True)
    layout = {"use_contiguous_weight_layout_attention": True, "use_interleaved_weight_layout_mlp": False}
    settings = RunSettings(lora_alpha=6.0, heads=heads_of({**SIZES, **layout}, Heads()))
    gather_adapter(ranks, str(tmp_path / "peft"), "peft", strategy, settings)
    assert_apart(tmp_path / "peft")
    back = RunSettings(heads=settings.heads)
    scatter_adapter(str(tmp_path / "peft"), str(tmp_path / "slices"), strategy, settings=back)
    gather_adapter(str(tmp_path / "slices"), str(tmp_path / "whole.ckpt"), "ckpt", strategy)
    found = files.read(str(tmp_path / "whole.ckpt"))
    for name, array in whole.items():
        path, _, half = name.partition(".mindpet_delta_lora_")
        np.testing.assert_array_equal(found.tensors[path, half.upper()], array)


def test_sizes_that_contradict_the_rows_are_refused(tmp_path):
    ranks, strategy, _ = write_run(tmp_path)
    for heads in (Heads(HEADS, KV_HEADS, 8), Heads(HEADS + 1, KV_HEADS), Heads(HEADS, HEADS, HEAD_DIM)):
        arguments = ranks, str(tmp_path / "out"), "peft", strategy, RunSettings(lora_alpha=6.0, heads=heads)
        refused(
            AdapterError, part(f"do not match {heads.heads} heads and {heads.kv_heads} key"), gather_adapter, *arguments
        )


def test_convert_takes_the_size_of_a_head_from_the_rows(tmp_path):
    ranks, strategy, _ = write_run(tmp_path)
    gather_adapter(ranks, str(tmp_path / "own.ckpt"), "ckpt", strategy, RunSettings(lora_alpha=6.0))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({**SIZES, "model_type": "qwen3"}))
    adapter = files.read(str(tmp_path / "own.ckpt"))
    adapter.base_model = str(tmp_path / "base")
    files.write(adapter, str(tmp_path / "own.safetensors"), "mindformers")
    convert_adapter(str(tmp_path / "own.safetensors"), str(tmp_path / "peft"), "peft")
    assert_apart(tmp_path / "peft")


def test_pairs_of_wq_and_w1_alone_tell_how_many_rows_the_joined_cells_have(tmp_path):
    _, strategy, _ = write_run(tmp_path)
    paths, tensors = {name: f"model.layers.0.{LEGACY[name]}" for name in ("q", "gate")}, {}
    for name, path in paths.items():
        tensors[path, "A"], tensors[path, "B"] = np.ones((RANK, HIDDEN), np.float32), blocks()[name]
    files.write(Adapter(tensors, dict.fromkeys(paths.values(), 6.0)), str(tmp_path / "some"))
    settings = RunSettings(heads=Heads(HEADS, KV_HEADS))
    scatter_adapter(str(tmp_path / "some"), str(tmp_path / "slices"), strategy, settings=settings)
    gather_adapter(str(tmp_path / "slices"), str(tmp_path / "peft"), "peft", strategy, settings)
    found = files.read(str(tmp_path / "peft"))
    assert sorted(found.paths) == sorted(paths.values())
    for name, path in paths.items():
        np.testing.assert_array_equal(found.tensors[path, "B"], blocks()[name])


@pytest.mark.parametrize("where", ["pretrained_model_dir", "llm_model"])
def test_the_yaml_may_have_the_sizes_elsewhere(where, tmp_path, capsys):
    ranks, strategy, _ = write_run(tmp_path)
    model_config = {"pet_config": {"pet_type": "lora", "lora_rank": RANK, "lora_alpha": 6, "target_modules": ".*"}}
    run = {"use_legacy": False, "model": {"model_config": model_config}}
    if where == "llm_model":
        run["model"] = {"model_config": {"llm_model": {"model_config": {**SIZES, **model_config}}}}
    else:
        run["pretrained_model_dir"] = str(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({**SIZES, "head_dim": HEAD_DIM}))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    options = ["--config", str(tmp_path / "run.yaml"), "--strategy", strategy, "--output", str(tmp_path / "peft")]
    assert main(["adapter", "gather", ranks, *options]) == 0, capsys.readouterr().err
    assert_apart(tmp_path / "peft")
