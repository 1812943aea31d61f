"""Overrides of a YAML mean the same to mindlora-run, which MindFormers fills in, and to what works without it."""

import json
import os

import pytest
import yaml
from mindformers.tools.register.template import CONFIG_NAME_TO_CLASS, ConfigTemplate
from mindformers.tools.utils import parse_value

from mindlora.core import overrides
from mindlora.core.errors import ConfigError
from mindlora.core.yaml_file import read_yaml, value_at
from mindlora.training.launch import launcher
from tests.conftest import ROOT

YAML = os.path.join(ROOT, "configs", "tiny", "lora_llama_tiny_cpu.yaml")
# MindFormers 1.8 lacks them.
NEWER = {"reshard_worker_num"}


@pytest.mark.parametrize("node", overrides.CLOSED_NODES)
def test_the_keys_of_a_closed_node_are_those_that_mindformers_fills_in(node):
    keys = set(CONFIG_NAME_TO_CLASS[node or "general_config"].keys())
    assert keys | NEWER == set(overrides.CLOSED_NODES[node]) | (NEWER if node else set())


def test_the_nodes_are_those_that_mindformers_makes():
    nodes = {*ConfigTemplate.general_configs, *ConfigTemplate.train_configs} - {"general_config", "callbacks"}
    assert nodes == {*overrides._NODES, *overrides._TRAINING_NODES}


@pytest.mark.parametrize("text", ["3", "-4", "1e-4", "1.5", "True", "true", "null", "[1, 2]", "[1", "a=b", '"3"', ""])
def test_values_are_read_as_mindformers_reads_them(text):
    value = parse_value(text)
    assert overrides.read_value(text) == value and type(overrides.read_value(text)) is type(value)


@pytest.mark.parametrize(
    "text, value",
    [
        ("{loss: dpo, precomputed_reference: True}", {"loss": "dpo", "precomputed_reference": True}),
        ("['input_ids', labels]", ["input_ids", "labels"]),
        ("{}", {}),
        ("{instruction}", "{instruction}"),
        ("[INST] {instruction} [/INST]", "[INST] {instruction} [/INST]"),
        ("{loss: dpo", "{loss: dpo"),
    ],
)
def test_lists_and_nodes_may_be_written_as_yaml_has_them(text, value):
    assert overrides.read_value(text) == value


@pytest.mark.parametrize("run_mode", ["finetune", "predict", "eval"])
@pytest.mark.parametrize(
    "words",
    [
        ["--callbacks.LoraCheckpoint.save_steps", "50"],
        ["--callbacks.LoraChekpoint.save_steps", "50"],
        ["--callbacks.0.type", "MFLossMonitor"],
        ["--callbacks.99.type", "MFLossMonitor"],
        ["--runner_config.epochs", "3"],
        ["--runner_config.epoch", "3"],
        ["--epochs", "3"],
        ["--epochs=3"],
        ["--batch_size", "three"],
        ["--use_parallel", "yes"],
        ["--parallel_config.data_parallel", "2"],
        ["--parallel_config.dp", "2"],
        ["--recompute_config.recompute", "True"],
        ["--recompute_config.recompte", "True"],
        ["--swap_config.swap", "True"],
        ["--moe_config.expert_num", "4"],
        ["--model.model_config.hidden_size", "64"],
        ["--model.model_config.new_key", "64"],
        ["--model.modelconfig.hidden_size", "64"],
        ["--model.model_config.pet_config.lora_rank=4"],
        ["--runner_wrapper.scale_sense", "1.0"],
        ["--optimizer.type", "SGD"],
        ["--lr_schedule.learning_rate", "1e-4"],
        ["--seed", "3"],
        ["--load_ckpt_format", "safetensors"],
        ["--load_ckpt_fromat", "safetensors"],
        ["--run_mode.x", "1"],
        ["--context.mode", "1"],
        ["--trainer.model_name", "x"],
        ["--a.b", "1"],
        ["--parallel_config", '{"data_parallel": 2}'],
        ["--parallel_config", '{"dp": 2}'],
        ["--model.model_config.pet_config", '{"lora_rank": 4}'],
    ],
    ids=" ".join,
)
def test_mindlora_run_and_the_rest_take_and_refuse_the_same(words, run_mode):
    def by_mindlora_run():
        return launcher.build_config(["--config", YAML, "--run_mode", run_mode, *words])

    def without_mindformers():
        config = read_yaml(YAML)
        overrides.apply_overrides(config, ["--run_mode", run_mode, *words])
        return config

    results = []
    for build in (by_mindlora_run, without_mindformers):
        try:
            results.append(build())
        except ConfigError:
            results.append(None)
    refused = [config is None for config in results]
    assert refused[0] == refused[1]
    if not refused[0]:
        key = words[0][2:].partition("=")[0]
        key = overrides.FLAGS[key].key if key in overrides.FLAGS else key
        if not key.startswith("callbacks."):
            value, given = (value_at(config, key) for config in results)
            assert value == given or all(value[name] == given[name] for name in given)
        assert results[0]["callbacks"] == results[1]["callbacks"]


def kinds(node):
    """Returns {key: the kind of its value} of a node, with the nodes and lists in it."""
    items = enumerate(node) if isinstance(node, list) else node.items()
    return {key: (type(item), kinds(item)) for key, item in items if isinstance(item, (dict, list))}


def test_a_node_from_the_command_line_is_what_it_is_in_a_yaml(tmp_path):
    nodes = {
        "parallel": {"parallel_mode": 0, "strategy_ckpt_config": {"save_file": "x.ckpt"}},
        "runner_wrapper": {"type": "LoraTrainOneStepCell", "scale_sense": {"type": "DynamicLossScaleUpdateCell"}},
        "runner_config": {"epochs": 2, "batch_size": 3},
    }
    content = {**read_yaml(YAML), **nodes}
    content["train_dataset"]["extra"] = [{"type": "A", "node": {"b": 1}}]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    in_yaml = launcher.build_config(["--config", str(path)])
    words = [word for key, node in nodes.items() for word in (f"--{key}", json.dumps(node))]
    words += ["--train_dataset.extra", json.dumps(content["train_dataset"]["extra"])]
    on_command_line = launcher.build_config(["--config", YAML, *words])
    for key in (*nodes, "train_dataset"):
        assert on_command_line[key] == in_yaml[key] and kinds(on_command_line[key]) == kinds(in_yaml[key])
    assert on_command_line.runner_wrapper.scale_sense.type == "DynamicLossScaleUpdateCell"
    assert on_command_line.runner_config.sink_mode is True
