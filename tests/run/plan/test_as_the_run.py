"""What a YAML's run is refused for, and what it counts: plan and doctor say what the built network says."""

import re

import pytest

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import LoraError
from mindlora.network.quantized.nf4 import parameter_count
from mindlora.network.tree import lora_cells
from mindlora.run.checks.targets import check_targets
from mindlora.run.plan.run import read_run
from mindlora.run.yaml_run import YamlRun
from tests.run.plan.test_models import parameters_of
from tests.support import mcore_networks, moe_networks
from tests.support.chatglm_networks import CHATGLM, chatglm
from tests.support.generated_yamls import pet_configs
from tests.support.planned_runs import TINY

LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
# Name of the model, what a YAML calls it, its model_config, and how many pet_configs are tried.
MODELS = {
    "llama": ("llama", "LlamaConfig", TINY, 45),
    "llama with joined cells": ("llama", "LlamaConfig", {**TINY, "qkv_concat": True}, 35),
    "llama with tied embeddings": ("llama", "LlamaConfig", {**TINY, "tie_word_embeddings": True}, 25),
    "qwen3": ("qwen3", "Qwen3Config", mcore_networks.TINY, 35),
    "qwen3 with tied embeddings": (
        "qwen3", "Qwen3Config", {**mcore_networks.TINY, "tie_word_embeddings": True}, 25
    ),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", moe_networks.QWEN3_MOE, 35),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", {**moe_networks.DEEPSEEK_V3, **LAYERS}, 30),
    "chatglm": ("chatglm", "ChatGLM2Config", CHATGLM, 25),
}  # fmt: skip


@pytest.fixture
def build(make_llama, monkeypatch):
    """Returns a function from the name and the model_config of a model to the network that MindFormers builds."""
    monkeypatch.setattr(mcore_networks, "for_a_cpu", lambda network: network)
    monkeypatch.setattr(moe_networks, "for_a_cpu", lambda network: network)
    monkeypatch.setattr(mcore_networks, "filled", lambda network, _: network)
    monkeypatch.setattr(moe_networks, "filled", lambda network, _: network)
    builders = {
        "llama": lambda keys: make_llama(**{**keys, "type": None}),
        "qwen3": lambda keys: mcore_networks.tiny_qwen3(**keys),
        "chatglm": lambda keys: chatglm(**keys),
    }
    return lambda model, keys: builders.get(model, lambda keys: moe_networks.tiny_moe(model, **keys))(keys)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_refused_and_counted_as_its_network_is(name, build):
    model, kind, keys, count = MODELS[name]
    differences, refused = [], 0
    for pet in pet_configs(model, count, name):
        planned = plan(kind, keys, pet)
        built, trainable = train(lambda: build(model, keys), pet)
        examined = examine(kind, keys, pet)
        refused += isinstance(built, str)
        if planned != built or examined != (built if isinstance(built, str) else trainable):
            differences.append((pet, planned, examined, built, trainable))
    assert not differences
    assert 0.2 * count < refused < 0.9 * count


def plan(kind, keys, pet):
    """Returns what mindlora plan knows of a run: the error's text, or its parameters and their count."""
    model, step = {"model_config": {**keys, "type": kind, "pet_config": pet}}, {"type": "LoraTrainOneStepCell"}
    config = {"run_mode": "finetune", "model": model, "runner_wrapper": step}
    try:
        weights = read_run(config).weights
    except LoraError as error:
        return words_of(error)
    parameters = {weight.name: (weight.shape, weight.dtype, weight.trained) for weight in weights}
    return parameters, sum(weight.count for weight in weights)


def examine(kind, keys, pet):
    """Returns what mindlora doctor knows of a run: the error's text, or how many parameters train."""
    config = {"model": {"arch": {"type": kind}, "model_config": {**keys, "pet_config": pet}}}
    run = YamlRun(config)
    findings = [*run.pet_findings, *(check_targets(run, run.lora) if run.lora else [])]
    errors = [finding.found for finding in findings if finding.severity == "error"]
    if errors:
        return words_of(errors[0])
    (count,) = re.findall(r"LoRA on \d+ cells, ([\d,]+) parameters", " ".join(finding.found for finding in findings))
    return int(count.replace(",", ""))


def train(build, pet):
    """Returns what plan does of the built network, after apply_lora and freeze_base; and how many parameters trained.

    These are counted before freeze_base freezes or trains more of them.
    """
    try:
        config, network = LoraConfig.from_pet_config(pet), build()
        report = apply_lora(network, config)
        config.variant.check_paths([path for path, _ in lora_cells(network)])
        freeze_base(network)
        trainable = sum(p.size for p in network.trainable_params())
        freeze_base(network, config)
    except LoraError as error:
        return words_of(error), None
    built = parameters_of(network)
    left_out = sum(p.size for p in network.get_parameters()) - sum(p.size for p in built)
    parameters = {p.name: (tuple(p.shape), str(p.dtype).lower(), p.requires_grad) for p in built}
    assert report.trainable == trainable
    return (parameters, parameter_count(network) - left_out), trainable


def words_of(error):
    """Returns an error's text without what only one of the two knows: other cells' classes, the order of cells."""
    text = re.split(r" '[^']+' does match | Choose from ", str(error))[0]
    return " ".join(sorted(re.split(r"[ ,.;]+", text)))
