"""pet_config.adapters in a YAML: what adapters may differ in, and what a run with several needs."""

import copy
import re

import pytest

from mindlora.core.errors import ConfigError
from mindlora.core.yaml_file import PET
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.yaml_run import YamlRun
from mindlora.training.several.rules import KEY, check_adapters, check_cells, trained_adapters

ADAPTERS = [{"name": "small", "lora_rank": 2}, {"learning_rate": 1.0e-3, "target_modules": ".*wk", "seed": 5}]


def pet_config(adapters=ADAPTERS, **keys):
    """A pet_config with adapters."""
    return {"pet_type": "lora", "lora_rank": 8, "target_modules": ".*wq", "adapters": copy.deepcopy(adapters), **keys}


def config(pet=None, **changes):
    """A YAML that trains two adapters."""
    model = {"arch": {"type": "LlamaForCausalLM"}, "model_config": {"type": "LlamaConfig", "pet_config": pet_config()}}
    model["model_config"]["pet_config"].update(pet or {})
    return {
        "run_mode": "finetune",
        "use_parallel": False,
        "context": {"mode": 0},
        "runner_config": {"sink_mode": False},
        "runner_wrapper": {"type": "LoraTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True},
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.95]},
        "callbacks": [{"type": "MFLossMonitor"}, {"type": "LoraCheckpoint"}],
        "model": model,
        **changes,
    }


def found(yaml):
    return [(finding.severity, finding.key, str(finding)) for finding in check_adapters(YamlRun(yaml))]


def test_what_an_adapter_does_not_say_is_that_of_pet_config():
    small, second = trained_adapters(PetLoraConfig.from_pet_config(pet_config()))
    assert (small.name, small.config.lora_rank, small.config.target_modules) == ("small", 2, ".*wq")
    assert (second.name, second.config.lora_rank, second.learning_rate) == ("adapter_2", 8, 1e-3)
    assert (second.config.target_modules, second.config.seed) == (".*wk", 5)
    assert small.learning_rate is None and small.config.adapters is None


@pytest.mark.parametrize(
    "adapters, message",
    [
        ([], "must be a list of nodes"),
        ({"small": {"lora_rank": 8}}, "must be a list of nodes"),
        ([{"quantize_base": "nf4"}], r"adapters\[0\] has quantize_base.* share one base in memory, in one form"),
        ([{"load_checkpoint": "base"}], "share one base in memory. Use two runs"),
        ([{"lora_dropout": 0.1}], "dropped out at once"),
        ([{"lora_rang": 8}], "the key 'lora_rang'.* Did you mean 'lora_rank'"),
        ([{"name": "a"}, {"name": "a"}], "has the name 'a' twice"),
        ([{"name": "../a"}], "must be the name of a folder"),
        ([{"name": 1}], "must be the name of a folder"),
        ([{"name": "a" * 300}], r"adapters\[0\]: name has 300 characters, .* choose one of 100 at most"),
        ([{"name": "adapters.json"}], "name is 'adapters.json', which the run writes beside the adapters"),
        ([{"name": "Comparison.html"}], "name is 'Comparison.html', which the run writes beside the adapters"),
        ([{"name": "a"}, {"name": "A"}], "has the name 'A' twice"),
        ([{"learning_rate": -1.0}], "a number of at least 0"),
        ([{"lora_rank": 0}], r"adapters\[0\]: lora_rank is 0"),
        ([{"data": ["a.mindrecord"]}], r"adapters\[0\]: data is \['a.mindrecord'\], but it must be the path"),
    ],
)
def test_wrong_adapters(adapters, message):
    with pytest.raises(ConfigError, match=message):
        trained_adapters(PetLoraConfig.from_pet_config(pet_config(adapters)))


def test_a_yaml_without_faults():
    assert found(config()) == []
    assert found({"run_mode": "finetune", "optimizer": {"type": "Adam"}}) == []
    qwen3 = {"model_config": {"model_type": "qwen3", "pet_config": pet_config()}}
    assert found(config(use_legacy=False, model=qwen3)) == []


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}


def cells_found(*adapters, **pet):
    """Returns what check_cells says of pet_config with adapters, as (severity, text)."""
    yaml = config({"adapters": list(adapters), **pet})
    yaml["model"]["model_config"].update(SIZES)
    lora = PetLoraConfig.from_pet_config(yaml["model"]["model_config"]["pet_config"])
    return [(finding.severity, finding.found) for finding in check_cells(YamlRun(yaml), lora)]


def test_the_cells_of_each_adapter_are_checked():
    found = cells_found({"name": "a"}, {"name": "b", "target_modules": ["wq", "foobar_proj"]})
    (mistake,) = [text for severity, text in found if severity == "error"]
    assert mistake.startswith("Adapter b: target_modules ['wq', 'foobar_proj']: 'foobar_proj' matches no linear cell.")
    found = cells_found({"name": "a", "rank_pattern": {"w_q": 2}}, {"name": "b", "rank_pattern": {"wq": 2}})
    assert ("warning", "Adapter a: 'w_q' matches none of the cells that target_modules selects.") in found
    found = cells_found({"name": "a", "lora_rank": 4}, {"name": "b", "lora_rank": 40})
    assert any(text.startswith("Adapter b: The rank exceeds") for severity, text in found if severity == "warning")


def test_what_is_said_of_all_adapters_is_said_once():
    found = cells_found({"name": "a", "seed": 1}, {"name": "b", "seed": 2}, lora_rank=40)
    assert [text.startswith("The rank exceeds") for severity, text in found if severity == "warning"] == [True]
    assert len([text for _, text in found if "LoRA on 2 cells" in text]) == 1


def test_data_of_an_adapter(tmp_path):
    (tmp_path / "own.mindrecord").touch()
    pet = {"adapters": [{"name": "own", "data": str(tmp_path / "own.mindrecord")}, {}]}
    data = {"data_loader": {"type": "MindDataset"}, "drop_remainder": True}
    assert found(config(pet, train_dataset=data)) == []
    pet["adapters"][0]["data"] = str(tmp_path / "other.mindrecord")
    ((_, key, message),) = found(config(pet, train_dataset=data))
    assert key == KEY and "data of the adapter own is" in message and "there is no MindRecord" in message
    pet["adapters"][0]["data"] = str(tmp_path / "own.mindrecord")
    changes = {"train_dataset": {"data_loader": {"type": "TFRecordDataset"}}, "lr_schedule": {"warmup_epochs": 1}}
    findings = found(config(pet, **changes))
    assert [key for _, key, _ in findings] == [
        *("lr_schedule.warmup_epochs", "train_dataset.data_loader.type", "train_dataset.drop_remainder")
    ]
    assert "Set warmup_steps or warmup_ratio" in findings[0][2] and "in batches of equal size" in findings[2][2]


FURTHER = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
BALANCED = {"model_type": "qwen3_moe", "moe_aux_loss_coeff": 0.001}


@pytest.mark.parametrize(
    "pet, changes, key, message",
    [
        ({}, {"run_mode": "predict"}, KEY, "Name one that is trained in adapter_path"),
        ({"adapters": [{"lora_rank": 0}]}, {}, KEY, r"adapters\[0\]"),
        ({"use_dora": True}, {}, KEY, "use_dora is True, but only plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, {}, f"{PET}.modules_to_save", "does not support"),
        ({"adapters": [{"name": "p", "lora_init": "pissa"}]}, {}, KEY, "p is pissa, which changes the base"),
        ({"adapters": [{"name": "p", "lora_init": "mica"}]}, {}, KEY, "p is mica, which trains A alone"),
        ({}, {"optimizer": {"type": "Lion"}}, "optimizer.type", "'Lion'.* Set it to AdamW"),
        ({}, {"optimizer": {"type": "AdamW", "use_fused": True}}, "optimizer.use_fused", "betas, eps, weight_decay"),
        ({}, {"runner_wrapper": {"type": "MFTrainOneStepCell"}}, "runner_wrapper.type", "LoraTrainOneStepCell"),
        ({}, {"use_parallel": True}, "use_parallel", "made for one device"),
        ({}, {"runner_config": {}}, "runner_config.sink_mode", "Set it to False"),
        ({}, {"context": {"mode": 1}}, "context.mode", "in graph mode"),
        (
            {},
            {"use_legacy": False, "model": {"model_config": {"model_type": "glm4", "pet_config": pet_config()}}},
            "model",
            "The model is glm4, and .* Qwen3MoeForCausalLM, DeepseekV3ForCausalLM. Train one adapter at a time",
        ),
        (
            {},
            {"use_legacy": False, "model": {"model_config": {**FURTHER, "pet_config": pet_config()}}},
            "model.model_config.num_nextn_predict_layers",
            "The model has 1 layers that predict further tokens, .* is not kept apart. Set it to 0",
        ),
        (
            {},
            {"use_legacy": False, "model": {"model_config": {**BALANCED, "pet_config": pet_config()}}},
            "model.model_config.moe_aux_loss_coeff",
            "moe_aux_loss_coeff is 0.001, but pet_config has adapters: the loss that balances .* Set it to 0",
        ),
        ({}, {"grouped_lr_schedule": {"default": {}}}, "grouped_lr_schedule", "one learning rate"),
        ({}, {"callbacks": [{"type": "SampleAnswers"}]}, "callbacks.SampleAnswers", "for a run with one adapter"),
        (
            {},
            {"callbacks": [{"type": "LoraCheckpoint", "keep_last": 1}]},
            "callbacks.LoraCheckpoint.keep_last",
            "no step that all have saved. Set it to 2 or more",
        ),
        (
            {},
            {"runner_wrapper": {"type": "LoraTrainOneStepCell", "preference": {"loss": "dpo"}}},
            "runner_wrapper.preference",
            "does not support",
        ),
        (
            {},
            {"runner_wrapper": {"type": "LoraTrainOneStepCell", "scale_sense": {"type": "DynamicLossScaleUpdateCell"}}},
            "runner_wrapper.scale_sense",
            "Write a number",
        ),
    ],
)
def test_what_keeps_adapters_from_training_in_one_run(pet, changes, key, message):
    findings = found(config(pet, **changes))
    assert [(severity, place) for severity, place, _ in findings] == [("error", key)]
    assert re.search(message, findings[0][2])
