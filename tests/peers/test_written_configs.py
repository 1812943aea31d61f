"""Whatever a command writes as PEFT's folder, PEFT puts adapters on exactly the modules that its tensors are of."""

import pytest

from mindlora import cli
from mindlora.files.adapters import files as adapter_files
from tests.support.peers import cases
from tests.support.peers.peer import arrays

SETTINGS = {
    "names": {"target_modules": ["q_proj", "down_proj"]},
    "regular expression": {"target_modules": r".*\.1\.(self_attn\.[kv]_proj|mlp\.gate_proj)"},
    "layers": {"target_modules": cases.ATTENTION, "layers_to_transform": [1]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "layers.0.mlp.up_proj"]},
    "patterns": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"up_proj": 3},
    },
    "head": {"target_modules": ["q_proj", "lm_head"]},
}
# Each writes "out" from the adapter "in".
COMMANDS = {
    "convert": ["adapter convert in out --to peft"],
    "convert from ckpt": ["adapter convert in a.ckpt --to ckpt", "adapter convert a.ckpt out --to peft"],
    "convert from joined cells": [
        "adapter convert in a.ckpt --to ckpt --concat --base model",
        "adapter convert a.ckpt out --to peft --base model",
    ],
    "resize": ["adapter resize in out --rank 2"],
    "combine": ["adapter combine out --method cat --adapter in 0.5 --adapter in 0.5"],
}


@pytest.fixture(scope="module")
def model(peer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "plain"
    shard_size, config = cases.MODELS["plain"]
    peer.make_model(folder=folder, seed=0, shard_size=shard_size, **config)
    return folder


@pytest.fixture(scope="module", params=SETTINGS)
def adapter(request, peer, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "in"
    config = {"r": 4, "lora_alpha": 6, **SETTINGS[request.param]}
    options = {"kind": "LoraConfig", "config": config, "dtype": "float32", "safetensors": True, "embeddings": "auto"}
    peer.make_adapter(model=model, folder=folder, seed=1, **options)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_peft_adapts_the_modules_that_the_tensors_are_of(peer, model, adapter, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").symlink_to(adapter)
    (tmp_path / "model").symlink_to(model)
    for line in COMMANDS[command]:
        assert cli.main(line.split()) == 0, capsys.readouterr().err
    keys = arrays(tmp_path / "out" / cases.WEIGHTS)
    stems = [key.removeprefix("base_model.model.").partition(".lora_")[0] for key in keys if ".lora_" in key]
    described = peer.describe(model=model, adapter=tmp_path / "out")
    assert set(described) == set(stems)
    written = adapter_files.read(str(tmp_path / "out"))
    assert sorted(scale for *_, scale in described.values()) == pytest.approx(sorted(map(written.scale, written.paths)))
