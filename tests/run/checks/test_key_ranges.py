"""Nodes of another kind than they must be, and numbers that are none: named at once, with what they must be."""

import pytest

from mindlora.cli.doctor.examination import check_yaml
from mindlora.core.errors import ConfigMistakes
from mindlora.run.checks.key_ranges import check_keys, check_shape
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch import launcher
from tests.support.runs import LORA_YAML, read_yaml, write_yaml


def changed(key, value):
    """Returns the content of a good YAML with one value replaced."""
    config = read_yaml(LORA_YAML)
    *parents, leaf = key.split(".")
    node = config
    for parent in parents:
        node = node[int(parent)] if isinstance(node, list) else node[parent]
    node[int(leaf) if isinstance(node, list) else leaf] = value
    return config


def test_a_good_yaml_has_no_mistake():
    config = read_yaml(LORA_YAML)
    run = YamlRun(config)
    assert [*check_shape(run), *check_keys(run)] == []


SHAPES = {
    "a text where keys should be": ("optimizer", "AdamW", "optimizer is 'AdamW', but it must be a node with keys"),
    "a list where keys should be": ("model.model_config.pet_config", [1], "pet_config is [1], but it must be a node"),
    "keys where a list should be": ("callbacks", {"type": "A"}, "callbacks is {'type': 'A'}, but it must be a list"),
    "a name where an item should be": ("callbacks.2", "LoraCheckpoint", "callbacks.2 is 'LoraCheckpoint', which has"),
    "an empty item": ("callbacks.0", None, "callbacks.0 is None, which has no type"),
    "a number as a path": ("load_checkpoint", 5, "load_checkpoint is 5, but it must be a path"),
    "a number as a path of a callback": ("callbacks.2.directory", 5, "callbacks.LoraCheckpoint: directory is 5"),
    "data that are a number": ("train_dataset.data_loader.dataset_dir", 5, "dataset_dir is 5, but it must be a path"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_node_of_the_wrong_kind_is_named(name, tmp_path):
    key, value, message = SHAPES[name]
    config = changed(key, value)
    assert [message in str(finding) for finding in check_shape(YamlRun(config))] == [True]
    path = str(write_yaml(tmp_path, config))
    assert [message in str(finding) for finding in check_yaml(path)] == [True]
    with pytest.raises(ConfigMistakes) as raised:
        launcher.build_config(["--config", path])
    assert [message in mistake for mistake in raised.value.mistakes] == [True]


NUMBERS = {
    "seed": (-1, "seed is -1, but it must be a whole number of at least 0."),
    "runner_config.epochs": (None, "runner_config.epochs has no value, but it must be a whole number of at least 1."),
    "runner_config.batch_size": (
        "16",
        "runner_config.batch_size is '16', but it must be a whole number of at least 1. ",
    ),
    "lr_schedule.learning_rate": ("1e-3", "lr_schedule.learning_rate: YAML reads 1e-3 as text"),
    "optimizer.learning_rate": ("0.001", "a number of at least 0. Write it without quotes: 0.001."),
    "lr_schedule.warmup_ratio": (5, "lr_schedule.warmup_ratio is 5, but it must be a number from 0 to 1."),
    "optimizer.weight_decay": (-0.1, "optimizer.weight_decay is -0.1, but it must be a number of at least 0."),
    "runner_wrapper.max_grad_norm": (0, "runner_wrapper.max_grad_norm is 0, but it must be a number above 0."),
    "runner_wrapper.scale_sense": ("big", "runner_wrapper.scale_sense is 'big', but it must be a number above 0."),
    "model.model_config.num_layers": (2.0, "num_layers is 2.0, but it must be a whole number of at least 1."),
    "model.model_config.hidden_size": ([128], "hidden_size is [128], but it must be a whole number of at least 1."),
    "model.model_config.n_kv_heads": (0, "n_kv_heads is 0, but it must be a whole number of at least 1."),
    "model.model_config.vocab_size": (True, "vocab_size is True, but it must be a whole number of at least 1."),
}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_is_none_or_out_of_range_is_named(key):
    value, message = NUMBERS[key]
    assert [message in str(finding) for finding in check_keys(YamlRun(changed(key, value)))] == [True]


def test_a_run_that_does_not_train_needs_no_numbers_of_training():
    assert list(check_keys(YamlRun({**changed("runner_config.epochs", 0), "run_mode": "predict"}))) == []
    scaled = changed("runner_wrapper.scale_sense", {"type": "DynamicLossScaleUpdateCell"})
    assert list(check_keys(YamlRun(scaled))) == []


def test_all_wrong_nodes_are_named_at_once():
    with pytest.raises(ConfigMistakes) as raised:
        launcher.build_config(["--config", LORA_YAML, "--callbacks", "1", "--load_checkpoint", "a", "--context", "2"])
    assert len(raised.value.mistakes) == 2


def test_base_config_that_leads_back_or_is_no_path_is_told(tmp_path):
    path = write_yaml(tmp_path, {**read_yaml(LORA_YAML), "base_config": "config.yaml"})
    assert f"base_config leads back to {path}" in check_yaml(path)[0].found
    path = write_yaml(tmp_path, {**read_yaml(LORA_YAML), "base_config": 5})
    assert "base_config is 5, but it must be the path of a YAML" in check_yaml(path)[0].found
