"""What mindlora takes and refuses under MindFormers' PyNative Trainer. One process tries it all: imports are slow."""

import json

import numpy as np
import pytest

from tests.support import pynative_runs, pynative_series
from tests.support.pynative_runs import LORA, LORA_WITH_EXPERTS, only_with_pynative_trainer
from tests.support.ranks import run_ranks

pytestmark = only_with_pynative_trainer

# Name -> changed top-level nodes, and what the message says.
CASES = {
    "unknown_key": ({"pet_config": {"lora_rnak": 4}}, "unknown key 'lora_rnak'. Did you mean 'lora_rank'?"),
    "two_ranks": ({"pet_config": {"lora_rank": 8}}, "pet_config.lora_rank is 8 and lora_config.lora_rank is 4"),
    "other_cells": (
        {"pet_config": {"target_modules": ".*linear_qkv"}},
        "lora_config selects model.decoder.layers.{0..1}.self_attention.linear_proj",
    ),
    "two_beginnings": (
        {"pet_config": {"lora_init": "gaussian"}, "lora_config": {**LORA, "lora_b_std": 0.1}},
        "pet_config.lora_init is 'gaussian' and lora_config.lora_b_std is 0.1: both set the initial values",
    ),
    "adapters": ({"pet_config": {"adapters": [{"name": "one"}, {"name": "one"}]}}, "adapters has the name 'one' twice"),
    "vera_on_joined_cells": (
        {"pet_config": {"use_vera": True}},
        "a VeRA adapter of such a cell cannot be saved. Leave them out of target_modules",
    ),
    "nf4": ({"pet_config": {"quantize_base": "nf4"}}, "no base is loaded that could be quantized"),
    "loftq": (
        {"pet_config": {"lora_init": "loftq", "quantize_base": "nf4"}},
        "pet_config.lora_init is 'loftq', which mindlora does not support",
    ),
    "two_initializations": (
        {"pet_config": {"lora_init": "pissa", "adapter_path": "/"}},
        "pet_config.lora_init is 'pissa' and pet_config.adapter_path is '/': both say how A and B begin",
    ),
    "no_adapter": ({"pet_config": {"adapter_path": "/nowhere"}}, "pet_config.adapter_path: /nowhere does not exist"),
    "no_module": ({"pet_config": {"modules_to_save": ["lm_heat"]}}, "modules_to_save names 'lm_heat'"),
    "nothing_frozen": ({"pet_config": {"freeze_exclude": ["*.lm_heat"]}}, "freeze_exclude pattern '*.lm_heat'"),
    "no_checkpoint": (
        {"checkpoint": {"enable_save": False, "load_path": "/nowhere"}},
        "checkpoint.load_path: /nowhere is empty or not there, and the run would go on with random weights",
    ),
    "dropout_on_experts": (
        {"model": pynative_runs.DEEPSEEK_V3, "lora_config": {**LORA_WITH_EXPERTS, "lora_dropout": 0.5}},
        "lora_dropout is not supported on stacked experts",
    ),
    "one_weight_of_experts": (
        {
            "model": pynative_runs.DEEPSEEK_V3,
            "lora_config": LORA_WITH_EXPERTS,
            "pet_config": {"target_parameters": ["mlp.experts.down_proj"]},
        },
        None,
    ),
    "other_experts": (
        {"model": pynative_runs.DEEPSEEK_V3, "pet_config": {"target_parameters": ["mlp.experts.down_proj"]}},
        "pet_config selects model.decoder.layers.1.mlp.experts, and lora_config does not",
    ),
    "wrapper": (
        {"runner_wrapper": {"type": "LoraTrainOneStepCell"}},
        "The YAML has runner_wrapper, which MindFormers' PyNative Trainer does not read. Remove it",
    ),
    "callbacks": (
        {"callbacks": [{"type": "AdapterSlices"}, {"type": "ExchangeCheck"}]},
        "callbacks has AdapterSlices, ExchangeCheck, which mindlora does not support",
    ),
    "unused": (
        {"callbacks": [{"type": "LeaveOut", "cell": "model.decoder.layers.1.self_attention.linear_proj"}]},
        "The loss has no gradient for decoder.layers.1.self_attention.linear_proj.lora_a",
    ),
    "matches_nothing": (
        {"lora_config": {**LORA, "target_modules": "^decoder"}},
        "Paths begin with model.decoder, so ^decoder matches none",
    ),
    "one_of_siblings": ({"lora_config": {**LORA, "target_modules": ".*linear_fc1"}}, None),
    "scales_and_ranks": (
        {"pet_config": {"lora_rank": 4, "use_rslora": True, "rank_pattern": {".*linear_proj": 2}}},
        None,
    ),
    "beginnings": ({"pet_config": {"lora_init": "orthogonal", "freeze_lora_a": True}}, None),
    "dropout": ({"lora_config": {**LORA, "lora_dropout": 0.5}}, None),
    "preset": (
        {"pet_config": {"preset": "large_dataset", "target_modules": "all-linear"}},
        "pet_config.lora_rank is 16 and lora_config.lora_rank is 4",
    ),
}


# Fields of pet_config that processes refuse which divide a model; a callback would be refused once it is divided.
WHOLE_MODEL = {
    "modules_to_save": ["norm"],
    "freeze_exclude": ["*norm*"],
    "adapter_path": "/",
    "lora_init": "pissa",
    "quantize_base": "nf4",
    # A token of the first row.
    "alora_invocation_tokens": [int(pynative_runs.counting_rows(4)[0][0, 3])],
    "use_adalora": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("refusals")


@pytest.fixture(scope="module")
def messages(folder):
    """Name -> what refused the case, or None."""
    data = folder / "rows.mindrecord"
    pynative_runs.write_data(data, rows=4)
    configs = []
    for name, (changes, _) in CASES.items():
        config = {**pynative_runs.tiny_config("qwen3", data, 1), **changes}
        recorded = {"type": "RecordLosses", "directory": str(folder / name), "frozen": True}
        configs.append({**config, "callbacks": [*config.get("callbacks", []), recorded]})
    return dict(zip(CASES, pynative_runs.series(configs, folder)))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_by_name(messages, name):
    expected = CASES[name][1]
    assert (messages[name] is None) == (expected is None), messages[name]
    assert expected is None or expected in messages[name]


def test_siblings_that_the_pattern_does_not_match_get_no_adapter(folder, messages):
    """MindFormers 2.0 looks for them under the path of the cell before, which does match."""
    trained = pynative_runs.trained(folder / "one_of_siblings")
    assert {name.rpartition(".")[0] for name in trained} == {
        f"decoder.layers.{layer}.mlp.linear_fc1" for layer in (0, 1)
    }


def test_without_a_checkpoint_the_base_has_its_initial_values(folder, messages):
    """MindFormers 2.0 leaves it under its LoRA as the memory was."""
    with np.load(folder / "one_of_siblings" / "frozen.npz") as frozen:
        weights = {name: frozen[name] for name in frozen if name.endswith("linear_fc1.weight")}
    assert len(weights) == 2
    for weight in weights.values():
        assert 0.001 < weight.std() < 0.1 and abs(weight.mean()) < 0.01


def test_what_needs_a_whole_model_is_refused_in_two_processes_that_divide_it(folder, messages):
    given, found = folder / "given.json", folder / "two.json"
    config = pynative_runs.tiny_config("qwen3", folder / "rows.mindrecord", 1)
    config["training"] = {**config["training"], "local_batch_size": 2}
    nodes = [{field: value} for field, value in WHOLE_MODEL.items()]
    nodes[-1]["target_r"] = 2
    shared = [{"adapters": [{"name": "one"}]}, {"use_vera": True}]
    sharing = [{**config, "pet_config": node, "parallelism": {"data_parallel_shard": 1}} for node in shared]
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}))
    rl = {"prompts": "prompts.jsonl", "reward_funcs": "exact_answer", "tokenizer": "model", "max_completion_length": 4}
    rewards = {**config, "rl": rl, "train_dataset": {"dataloader": {"type": "RlSteps"}}}
    classifier = {**config["model"], "architectures": "Qwen3ForSequenceClassification", "num_labels": 2}
    divided = [{**config, "model": classifier}, *({**config, "pet_config": node} for node in nodes)]
    sharing[1]["lora_config"] = {**LORA, "target_modules": r"linear_(proj|fc2)$"}
    given.write_text(json.dumps([rewards, *sharing, *divided]))
    run_ranks(2, folder, pynative_series.__file__, given, found, trainer="pynative")
    of_rewards, of_adapters, of_vera, of_classifier, *messages = json.loads(found.read_text())
    assert "a run learns from rewards in one process, but this one has 2" in of_rewards
    for message, field in ((of_adapters, "adapters"), (of_vera, "use_vera")):
        assert f"pet_config has {field}" in message and "this run has 2 processes" in message
    assert "model.architectures is Qwen3ForSequenceClassification, which mindlora supports" in of_classifier
    for field, message in zip(WHOLE_MODEL, messages):
        assert f"pet_config.{field} is" in message and "here 2 processes divide it" in message
        assert "Set parallelism.data_parallel_shard: 1" in message and "remove it" in message
