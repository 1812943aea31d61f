"""runner_wrapper.rl in a YAML: what it needs from the rest of it."""

import re

import pytest

from mindlora.core.yaml_file import PET
from mindlora.run.yaml_run import YamlRun
from mindlora.training.rl.rules import KEY, check_rl, settings_of, steps_of
from mindlora.training.rl.settings import rl_settings
from mindlora.training.several.rules import KEY as ADAPTERS

RL = {"prompts": "prompts.jsonl", "reward_funcs": "exact_answer", "max_completion_length": 8, "tokenizer": "model"}
TAUGHT = {**{key: RL[key] for key in RL if key != "reward_funcs"}, "teacher": "base"}
WHOLE = {"loss_in_pieces": False}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("{}", encoding="utf-8")


def config(rl=RL, pet=(), model=(), **changes):
    """A YAML that learns from rewards."""
    sizes = {"type": "LlamaConfig", "seq_length": 32, **dict(model)}
    return {
        "run_mode": "finetune",
        "use_parallel": False,
        "context": {"device_target": "CPU"},
        "runner_wrapper": {"type": "LoraTrainOneStepCell", "rl": rl},
        "model": {"model_config": {**sizes, "pet_config": {"pet_type": "lora", "target_modules": ".*wq", **dict(pet)}}},
        **changes,
    }


def several(*adapters, rl=RL, **changes):
    """A YAML with adapters, of which these are the rl nodes; or with other keys too, where a node has a name."""
    nodes = [node if "name" in node else {"rl": node} for node in adapters]
    return config(rl, pet={"adapters": nodes}, **changes)


def found(yaml):
    return [(finding.severity, finding.key, str(finding)) for finding in check_rl(YamlRun(yaml))]


def test_a_yaml_without_faults():
    assert found(config()) == []
    assert found(config({**RL, "held_out_prompts": "held_out.jsonl", "beta": 0.1})) == []
    assert found(config({**RL, "teacher": "held_out.jsonl"})) == []
    assert found(config({**TAUGHT, "held_out_prompts": "held_out.jsonl", "held_out_steps": 5})) == []
    assert found(config({**TAUGHT, "gkd": {"lmbda": 1}})) == []
    assert found(config(pet={"pet_type": "qlora"})) == []
    assert found(config(pet={"use_dora": True})) == []
    assert found(config(use_parallel=True, parallel={"parallel_mode": 0})) == []
    experts = {"model_type": "qwen3_moe", "num_experts": 4}
    assert found(config(use_legacy=False, model=experts)) == []
    assert found(several({}, {"seed": 3, "algorithm": "rloo", "beta": 0.1})) == []
    assert found(several({}, {"gkd": {"beta": 0, "seq_kd": True}}, rl={**TAUGHT, "gkd": {"lmbda": 1}})) == []
    without = {key: RL[key] for key in RL if key != "reward_funcs"}
    assert found(several({"reward_funcs": "numeric_answer"}, {"reward_funcs": "exact_answer"}, rl=without)) == []
    assert found(config({}, run_mode="predict")) == []
    assert found({"run_mode": "finetune", "runner_wrapper": {}}) == []


@pytest.mark.parametrize(
    "yaml, key, message",
    [
        (config({**RL, "betta": 1}), KEY, "rl has no key 'betta'. Did you mean 'beta'"),
        (config({"reward_funcs": "exact_answer"}), f"{KEY}.prompts", "rl has no prompts"),
        (config(runner_wrapper={"type": "MFTrainOneStepCell", "rl": RL}), KEY, "type is MFTrainOneStepCell"),
        (
            config(use_parallel=True, parallel={"parallel_mode": 0}, parallel_config={"model_parallel": 2}),
            KEY,
            "whole model in each process, but parallel_config.model_parallel is 2",
        ),
        (
            config(use_parallel=True, parallel={"parallel_mode": 0}, parallel_config={"data_parallel": 3}),
            f"{KEY}.prompts_per_step",
            "prompts_per_step is 8, and 3 processes .* Set it to a multiple of 3",
        ),
        (
            config(runner_wrapper={"type": "LoraTrainOneStepCell", "rl": RL, "preference": {}}),
            KEY,
            "has rl and preference",
        ),
        (config(pet={"lora_dropout": 0.1}), f"{PET}.lora_dropout", "is 0.1, .* Set it to 0.0"),
        (config(pet={"quantize_base": "as_stored"}), f"{PET}.quantize_base", "in float or in NF4. Remove it, or set"),
        (config(pet={"use_dora": True}, context={"device_target": "Ascend"}), PET, "of DoRA, with .* on a CPU"),
        (config(pet={"use_miss": True}), PET, "of MiSS, and rl samples with plain LoRA or DoRA"),
        (config(pet={"neftune_alpha": 5.0}), f"{PET}.neftune_alpha", "adds no noise. Remove neftune_alpha"),
        (config(pet={"modules_to_save": ["lm_head"]}), f"{PET}.modules_to_save", "Remove modules_to_save"),
        (config(pet={"lora_init": "pissa"}), f"{PET}.lora_init", "the base is the reference"),
        (config(model={"seq_length": None}), "model.model_config.seq_length", "is missing"),
        (config({**RL, "max_completion_length": 32}), f"{KEY}.max_completion_length", "leaves no room for a prompt"),
        (
            config(runner_config={"gradient_accumulation_steps": 4}),
            "runner_config.gradient_accumulation_steps",
            "Set it to 1",
        ),
        (config(runner_config={"sink_mode": True}), "runner_config.sink_mode", "Set it to False"),
        (config(callbacks=[{"type": "HeldOutLoss"}]), "callbacks.HeldOutLoss", "prompts alone. Remove it"),
        (
            config({**RL, "num_iterations": 3}, callbacks=[{"type": "LoraCheckpoint", "save_steps": 10}]),
            "callbacks.LoraCheckpoint.save_steps",
            "Make save_steps a multiple",
        ),
        (
            config(
                {**RL, "held_out_prompts": "held_out.jsonl"}, callbacks=[{"type": "LoraCheckpoint", "save_steps": 15}]
            ),
            "callbacks.LoraCheckpoint.save_steps",
            "held_out_reward is measured every 10 steps",
        ),
        (
            config(
                {**TAUGHT, "held_out_prompts": "held_out.jsonl"},
                callbacks=[{"type": "LoraCheckpoint", "save_steps": 15}],
            ),
            "callbacks.LoraCheckpoint.save_steps",
            "held_out_teacher/kl is measured every 10 steps",
        ),
        (
            config({**TAUGHT, "gkd": {}}, runner_wrapper={**config({**TAUGHT, "gkd": {}})["runner_wrapper"], **WHOLE}),
            "runner_wrapper.loss_in_pieces",
            "for some tokens at a time. Remove it",
        ),
        (config({**RL, "prompts": "nowhere.jsonl"}), f"{KEY}.prompts", "nowhere.jsonl does not exist"),
        (config({**RL, "teacher": "nowhere"}), f"{KEY}.teacher", "there is no adapter at nowhere"),
        (config({**RL, "reward_funcs": "no.py:short"}), f"{KEY}.reward_funcs", "names no.py, which is not"),
        (config({**RL, "tokenizer": None}), f"{KEY}.tokenizer", "rl.tokenizer names none"),
        (config(use_legacy=False, model={"model_type": "deepseek_v3"}), "use_legacy", "mindlora serves Qwen3"),
        (several({}, {"betta": 1}), KEY, "^adapter_2: rl has no key 'betta'. Did you mean 'beta'"),
        (several({}, {}, rl="rewards.py:short"), KEY, "rl is 'rewards.py:short', but it must be a node"),
        (several({}, {"temperature": 2}), KEY, "rl of the adapter adapter_2 has temperature, .* computed at once"),
        (several({}, {"prompts": "held_out.jsonl"}), KEY, "adapter_2 has prompts, in which adapters cannot differ"),
        (several({"gkd": {"lmbda": 1}}, {}, rl=TAUGHT), KEY, "Some adapters have gkd, and others do not, .* for none"),
        (several({"reward_funcs": "numeric_answer"}, {}, rl=TAUGHT), KEY, "Some adapters have rewards, and others"),
        (
            several({}, {"max_completion_length": 40}),
            f"{KEY}.max_completion_length",
            "Adapter adapter_2: rl.max_completion_length is 40",
        ),
        (several({}, {"reward_funcs": "no.py:a"}), f"{KEY}.reward_funcs", "Adapter adapter_2: .* names no.py"),
        (several({"name": "own", "data": "rows.mindrecord"}), ADAPTERS, "The adapter own has data, .* Remove data"),
        (several({"seed": 1}, rl=None), ADAPTERS, "adapter_1 has rl, but the run does not learn from rewards"),
    ],
)
def test_what_does_not_go_with_rl_is_an_error(yaml, key, message):
    matching = [text for severity, where, text in found(yaml) if (severity, where) == ("error", key)]
    assert any(re.search(message, text) for text in matching), found(yaml)


def test_an_adapter_s_node_goes_before_that_of_the_run():
    settings = settings_of(YamlRun(several({"seed": 7}, {"beta": 0.3}, rl={**RL, "beta": 0.1})))
    assert [(name, one.seed, one.beta) for name, one in settings.items()] == [
        ("adapter_1", 7, 0.1),
        ("adapter_2", None, 0.3),
    ]


def test_steps_are_those_of_all_passes_over_the_prompts():
    settings = rl_settings({**RL, "prompts_per_step": 4, "num_iterations": 2})
    assert steps_of(11, 3, settings) == 2 * 3 * 2
    with pytest.raises(Exception, match="has 3 prompts, and rl.prompts_per_step is 4"):
        steps_of(3, 1, settings)
