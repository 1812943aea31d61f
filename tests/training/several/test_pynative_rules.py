"""pet_config.adapters in a YAML of the PyNative Trainer: what each adapter is alone, and what is refused by name."""

import pytest

from mindlora.run.checks.pynative import check_pynative
from mindlora.run.checks.pynative_adapter import GRAPH_MODE_ALONE
from mindlora.training.several.rules import OF_ADAPTER, OF_ONE_ADAPTER, OF_RUN, adapters_of, alone_in_pynative

QWEN3 = {
    "model_type": "qwen3",
    "architectures": "Qwen3ForCausalLM",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 64,
}
DATA = {"dataloader": {"type": "MindDataset", "dataset_files": "rows.mindrecord"}}


def yaml(**nodes):
    """Returns the content of a YAML with two adapters; a node of pet_config or of the model adds to the usual one."""
    pet_config = {"adapters": [{"name": "small", "lora_rank": 2}, {}], **nodes.pop("pet_config", {})}
    return {
        "model": {**QWEN3, **nodes.pop("model", {})},
        "lora_config": {"target_modules": "linear_qkv|linear_proj", "lora_rank": 8, "lora_alpha": 16},
        "optimizer": {"type": "AdamW", "weight_decay": 0.0},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3},
        "train_dataset": DATA,
        "training": {"steps": 4},
        "checkpoint": {"load_path": ""},
        "pet_config": pet_config,
        **nodes,
    }


def errors(config):
    return [finding for finding in check_pynative(config) if finding.severity == "error"]


def test_two_adapters_have_no_mistakes():
    assert errors(yaml()) == []


def test_a_run_alone_has_what_the_adapter_has_of_its_own(tmp_path):
    own = {"lora_rank": 2, "lora_alpha": 3, "use_rslora": True, "learning_rate": 0.5, "data": "own.mindrecord"}
    callbacks = [{"type": "LoraCheckpoint"}, {"type": "RunReport", "directory": "there"}]
    config = yaml(pet_config={"adapters": [{"name": "one", **own}, {"name": "other"}], "seed": 3}, callbacks=callbacks)
    one, other = (alone_in_pynative(config, adapter, "out") for adapter in adapters_of(config))
    assert one["pet_config"] == {"seed": 3, "lora_rank": 2, "lora_alpha": 3, "use_rslora": True}
    assert one["lora_config"] == {"target_modules": "linear_qkv|linear_proj", "lora_rank": 2, "lora_alpha": 3}
    assert one["lr_scheduler"]["learning_rate"] == 0.5
    assert one["train_dataset"]["dataloader"]["dataset_files"] == "own.mindrecord"
    assert [callback["directory"] for callback in one["callbacks"]] == ["out/one/lora_checkpoint", "there/one/"]
    assert other["pet_config"] == {"seed": 3} and other["lora_config"] == config["lora_config"]
    assert other["train_dataset"] == DATA and config["callbacks"] == callbacks


@pytest.mark.parametrize(
    "nodes, key, message",
    [
        ({"pet_config": {"adapters": [{"name": "a"}, {"name": "A"}]}}, "pet_config.adapters", "'A' twice"),
        ({"pet_config": {"adapters": [{"lora_dropout": 0.5}]}}, "pet_config.adapters", "cannot differ"),
        ({"pet_config": {"adapters": []}}, "pet_config.adapters", "must be a list of nodes"),
        ({"pet_config": {"use_dora": True}}, "pet_config.adapters", "only plain LoRA trains beside others"),
        ({"pet_config": {"modules_to_save": ["norm"]}}, "pet_config.modules_to_save", "does not support"),
        ({"pet_config": {"adapters": [{"lora_init": "pissa"}]}}, "pet_config.adapters", "changes the base"),
        ({"pet_config": {"adapters": [{"data": "/nowhere"}]}}, "pet_config.adapters", "data of the adapter adapter_1"),
        (
            {"pet_config": {"adapters": [{"rl": {"seed": 1}}]}},
            "pet_config.adapters",
            "adapter_1 has rl, but the run does not",
        ),
        ({"model": {"chunk_loss_num": 4}}, "model.chunk_loss_num", "Remove it"),
        ({"model": {"calculate_per_token_loss": True}}, "model.calculate_per_token_loss", "its own mean loss"),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type", "Set it to AdamW"),
        (
            {"optimizer": {"type": "AdamW", "use_fused": True}},
            "optimizer.use_fused",
            "the keys that it supports are type, betas",
        ),
        ({"training": {"steps": 4, "use_skip_step_on_nan": True}}, "training.use_skip_step_on_nan", "by itself"),
        ({"preference": {"loss": "dpo"}}, "preference", "one adapter"),
        ({"checkpoint": {"save_trainable_only": True}}, "pet_config.adapters", "save_trainable_only saves one adapter"),
        ({"callbacks": [{"type": "Forgetting"}]}, "callbacks", "there are MFLossMonitor, ProgressBar"),
    ],
)
def test_what_does_not_train_beside_others_is_refused_by_name(nodes, key, message):
    found = [finding for finding in errors(yaml(**nodes)) if finding.key == key]
    assert len(found) == 1 and message in str(found[0])


def test_what_is_wrong_with_one_adapter_names_it():
    (found,) = errors(yaml(pet_config={"adapters": [{"name": "one", "rank_pattern": {".*": 0}}, {"name": "other"}]}))
    assert "adapters[0]" in str(found)


def test_every_callback_follows_an_adapter_or_the_run():
    registry = pytest.importorskip("mindlora.training.callbacks.registry")
    ruled = {*OF_RUN, *OF_ADAPTER, *OF_ONE_ADAPTER, *GRAPH_MODE_ALONE, "EachAdapter"}
    assert ruled == {*registry.ORDER, "MFLossMonitor"}
