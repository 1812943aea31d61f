"""mindlora sweep: which adapters its options make, and what it refuses before anything runs."""

import os

import pytest
import yaml

from mindlora.cli import main
from mindlora.training.launch import launcher

CONFIG = {
    "run_mode": "finetune",
    "model": {"model_config": {"type": "LlamaConfig", "pet_config": {"pet_type": "lora", "target_modules": ".*wq"}}},
}


def write(folder, **pet_config):
    CONFIG["model"]["model_config"]["pet_config"].pop("adapters", None)
    config = {**CONFIG, "model": {"model_config": {**CONFIG["model"]["model_config"]}}}
    config["model"]["model_config"]["pet_config"] = {**CONFIG["model"]["model_config"]["pet_config"], **pet_config}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "run.yaml")


@pytest.mark.parametrize(
    "words, pet_config, message",
    [
        ([], {}, "Nothing varies: name values of --lr"),
        (["--lr", "1e-4"], {"adapters": [{"lora_rank": 8}]}, "has pet_config.adapters already"),
    ],
)
def test_refusals(words, pet_config, message, tmp_path, capsys):
    assert main(["sweep", write(tmp_path, **pet_config), *words]) == 1
    assert message in capsys.readouterr().err


def test_each_combination_is_an_adapter(tmp_path, monkeypatch, capsys):
    launched = []
    monkeypatch.setattr(launcher, "main", lambda words: launched.append(words) or 1)
    words = ["sweep", write(tmp_path), "--lr", "1e-4,3e-4", "--rank", "8,32", "--output_dir", str(tmp_path / "tried")]
    assert main([*words, "--resume", "--runner_config.epochs", "1"]) == 1
    assert "the run has failed" in capsys.readouterr().out
    path = tmp_path / "tried" / "sweep.yaml"
    flags = ["--config", str(path), "--output_dir", str(tmp_path / "tried")]
    assert launched == [[*flags, "--resume", "--runner_config.epochs", "1"]]
    adapters = yaml.safe_load(path.read_text())["model"]["model_config"]["pet_config"]["adapters"]
    assert adapters[1] == {"name": "lr1e-4_r32", "learning_rate": 1e-4, "lora_rank": 32}
    assert [adapter["name"] for adapter in adapters] == ["lr1e-4_r8", "lr1e-4_r32", "lr3e-4_r8", "lr3e-4_r32"]


def test_a_yaml_of_the_pynative_trainer_gets_adapters_beside_its_lora_config(tmp_path, monkeypatch):
    launched = []
    monkeypatch.setattr(launcher, "main", lambda words: launched.append(words) or 1)
    # So that it is put back.
    monkeypatch.setenv("LOCAL_DEFAULT_PATH", "")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"lora_config": {"lora_rank": 8}, "model": {}, "training": {}}))
    words = ["sweep", str(tmp_path / "run.yaml"), "--seed", "1,2", "--output_dir", str(tmp_path / "tried")]
    assert main([*words, "--training.steps", "3"]) == 1
    path = tmp_path / "tried" / "sweep.yaml"
    assert launched == [["--config", str(path), "--mode", "1", "--training.steps", "3"]]
    assert os.environ["LOCAL_DEFAULT_PATH"] == str(tmp_path / "tried")
    adapters = yaml.safe_load(path.read_text())["pet_config"]["adapters"]
    assert adapters == [{"name": "seed1", "seed": 1}, {"name": "seed2", "seed": 2}]
