"""rl in a YAML of MindFormers' PyNative Trainer: graph mode's rules, with that Trainer's keys, and what it needs."""

import pytest

from mindlora.run.checks.pynative import check_pynative
from mindlora.training.rl.rules import as_in_graph_mode

RL = {"prompts": "prompts.jsonl", "reward_funcs": "exact_answer", "max_completion_length": 8, "tokenizer": "model"}
TAUGHT = {**{key: RL[key] for key in RL if key != "reward_funcs"}, "teacher": "base", "gkd": {"lmbda": 1}}
MODEL = {
    "model_type": "qwen3",
    "architectures": "Qwen3ForCausalLM",
    "seq_length": 32,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "compute_dtype": "float32",
}
LORA = {"target_modules": "linear_qkv", "lora_rank": 4, "lora_alpha": 8}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("{}", encoding="utf-8")


def config(rl=RL, model=(), lora=(), **changes):
    return {
        "training": {"steps": 6, "local_batch_size": 2, "global_batch_size": 2, "seed": 4},
        "optimizer": {"type": "AdamW", "weight_decay": 0.0},
        "context": {"device_target": "CPU"},
        "model": {**MODEL, **dict(model)},
        "lora_config": {**LORA, **dict(lora)},
        "rl": rl,
        "train_dataset": {"dataloader": {"type": "RlSteps"}},
        **changes,
    }


def found(yaml):
    return [(finding.key, str(finding)) for finding in check_pynative(yaml) if finding.severity == "error"]


def several(*adapters, **changes):
    nodes = [{"name": f"adapter_{number}", **node} for number, node in enumerate(adapters)]
    return config(**{"pet_config": {"adapters": nodes}, **changes})


def test_a_yaml_without_faults():
    assert found(config()) == []
    assert found(config({**RL, "beta": 0.1, "algorithm": "rloo"}, pet_config={"quantize_base": "nf4"})) == []
    assert found(config({**RL, "num_iterations": 4})) == []
    assert found(config(TAUGHT)) == []
    assert found(several({}, {"rl": {"gkd": {"beta": 1, "lmbda": 1}}}, rl=TAUGHT)) == []
    assert found(several({"rl": {"seed": 3}}, {"seed": 2})) == []
    without = config()
    del without["train_dataset"], without["rl"]
    assert found(without) == []


@pytest.mark.parametrize(
    "yaml, key, message",
    [
        (config({**RL, "betta": 1}), "rl", "rl has no key 'betta'. Did you mean 'beta'"),
        (config({**RL, "prompts": "nowhere"}), "rl.prompts", "rl.prompts: nowhere does not exist"),
        (config(lora={"lora_dropout": 0.1}), "lora_config.lora_dropout", "lora_config.lora_dropout is 0.1"),
        (config(pet_config={"use_dora": True}), "pet_config", "of DoRA, and rl samples with plain LoRA"),
        (config(pet_config={"neftune_alpha": 5.0}), "pet_config.neftune_alpha", "pet_config has neftune_alpha, and rl"),
        (config(preference={"loss": "simpo"}), "rl", "the YAML has rl and preference, and a run learns from one"),
        (config(model={"seq_length": 8}), "rl.max_completion_length", "is 8 and seq_length 8"),
        (config(callbacks=[{"type": "Forgetting"}]), "callbacks.Forgetting", "needs rows with labels"),
        (config(model={"rope_scaling": {"factor": 2}}), "model", "Set: model.rope_scaling: null"),
        (
            config(model={"architectures": "DeepseekV3ForCausalLM", "model_type": "deepseek_v3"}),
            "model.architectures",
            "is one of MindFormers' mcore models, of which mindlora serves Qwen3ForCausalLM",
        ),
        (config({**RL, "tokenizer": None}), "rl.tokenizer", "Name its folder"),
        (
            config(TAUGHT, pet_config={"loss_in_pieces": False}),
            "pet_config.loss_in_pieces",
            "pet_config.loss_in_pieces is False, and rl.gkd compares",
        ),
        (config(model={"num_experts": 4}), "model.num_experts", "routed experts"),
        (
            config(model={"use_eod_attn_mask_compression": True}),
            "model.use_eod_attn_mask_compression",
            "ask for the ends of examples",
        ),
        (config(train_dataset={"dataloader": {"type": "MindDataset"}}), "train_dataset.dataloader.type", "RlSteps"),
        (
            config(training={"steps": 6, "local_batch_size": 2, "global_batch_size": 4}),
            "training.global_batch_size",
            "Set global_batch_size: 2",
        ),
        (
            config({**RL, "num_iterations": 3}, checkpoint={"save_interleaved_steps": 4}),
            "checkpoint.save_interleaved_steps",
            "is 4 and rl.num_iterations is 3",
        ),
        (several({"rl": {"temperature": 2}}, {}), "rl", "adapter_0 has temperature, in which adapters cannot differ"),
        (several({"rl": {"seed": 1}}, rl=None), "pet_config.adapters", "the run does not learn from rewards"),
    ],
)
def test_what_does_not_go_with_rl_is_an_error(yaml, key, message):
    assert any(where == key and message in text for where, text in found(yaml)), found(yaml)


def test_rows_of_joined_cells_lie_as_the_trainer_builds_them():
    run = as_in_graph_mode(config(model={"use_contiguous_weight_layout_attention": True}))
    assert "use_contiguous_weight_layout_attention" not in run.model
    assert (run.rows, run.lora.lora_rank, run.config["seed"]) == (2, 4, 4)
