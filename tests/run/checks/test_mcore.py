"""mindlora doctor on YAMLs of mcore models, and on those with the language model in llm_model."""

import json

import numpy as np
import pytest

from mindlora.cli.doctor.examination import check_yaml
from mindlora.core.yaml_file import PET
from mindlora.run.checks.data_rows import check_rows
from mindlora.run.checks.mcore import check_mcore
from mindlora.run.yaml_run import YamlRun

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 96,
    "vocab_size": 100,
    "moe_intermediate_size": 24,
    "num_experts": 4,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT = {**LATENT, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}


def mcore(family, pet_config=None, **keys):
    pet = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", **(pet_config or {})}
    model = {"architectures": family, **SIZES, **keys, "pet_config": pet}
    return {"use_legacy": False, "model.model_config": model, "model.arch": {}}


def found_in(path):
    return [(finding.severity, finding.key, finding.found) for finding in check_yaml(path)]


QKV, OUT = (4 + 2 * 2) * 12 + 64, 64 + 4 * 12


@pytest.mark.parametrize(
    "family, keys, count, parameters",
    [
        ("Qwen3ForCausalLM", {}, 8, 2 * 4 * (QKV + OUT + (192 + 64) + (64 + 96))),
        ("Qwen3MoeForCausalLM", {}, 4, 2 * 4 * (QKV + OUT)),
        (
            "DeepseekV3ForCausalLM",
            {**LATENT, "num_nextn_predict_layers": 0},
            12,
            # The sizes of MindFormers' own network of this configuration.
            2 * 4 * ((24 + 64) + (48 + 12) + (64 + 8) + (64 + 32)) + 4 * (256 + 160) + 4 * (48 + 64 + 64 + 24),
        ),
    ],
)
def test_a_yaml_of_an_mcore_model_without_faults_gets_one_note(write, family, keys, count, parameters):
    (finding,) = found_in(write(mcore(family, **keys)))
    assert finding[:2] == ("note", f"{PET}.target_modules")
    assert finding[2].startswith(f"LoRA on {count} cells, {parameters:,} parameters: decoder.layers.")


@pytest.mark.parametrize("names", ["q_proj|k_proj|v_proj", "linear_qkv", ".*wq|.*wk|.*wv"])
def test_targets_may_have_the_names_of_any_world(write, names):
    finding = found_in(write(mcore("Qwen3ForCausalLM", {"target_modules": names})))[0]
    assert finding[2].endswith(": decoder.layers.{0..1}.self_attention.linear_qkv.")


def test_a_part_of_a_joined_cell_is_an_error_without_advice_that_mcore_has_not(write):
    finding = found_in(write(mcore("Qwen3ForCausalLM", {"target_modules": ["q_proj", "v_proj"]})))[0]
    assert finding[:2] == ("error", f"{PET}.target_modules")
    assert finding[2].endswith("holds q_proj, k_proj, v_proj in one cell. Name linear_qkv, or k_proj as well.")


@pytest.mark.parametrize("family", ["Glm4ForCausalLM", "Qwen2ForCausalLM", "TeleChat2ForCausalLM"])
def test_an_mcore_model_that_does_not_train_is_an_error_in_the_first_line(write, family):
    findings = found_in(write({**mcore(family), "run_mode": "fintune"}))
    assert findings[0][:2] == ("error", "use_legacy") and f"the model is {family}" in findings[0][2]
    assert [key for _, key, _ in findings] == ["use_legacy", "run_mode"]


def test_biases_that_change_while_an_adapter_trains_have_to_be_saved_with_it(write):
    changes = {"callbacks": [{"type": "MFLossMonitor"}, {"type": "TopkBiasBalanceCallback"}]}
    family = "DeepseekV3ForCausalLM"
    found = found_in(write({**mcore(family, **LATENT), **changes}))
    assert found[0][0] == "error" and "changes expert_bias of the base in every step" in found[0][2]
    for module in ("router", "mlp.gate"):
        found = found_in(write({**mcore(family, {"modules_to_save": [module]}, **LATENT), **changes}))
        assert not [finding for finding in found if finding[0] == "error"]


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_router_without_such_biases_may_have_the_callback(write, family):
    changes = {"callbacks": [{"type": "TopkBiasBalanceCallback"}]}
    own = LATENT if family.startswith("Deepseek") else {}
    off = {"moe_router_enable_expert_bias": False} if own else {}
    found = found_in(write({**mcore(family, **own, **off), **changes}))
    assert not [finding for finding in found if "expert_bias" in finding[2]]
    on = {"moe_router_enable_expert_bias": True}
    found = found_in(write({**mcore(family, **own, **on), **changes}))
    assert [finding for finding in found if "expert_bias" in finding[2]]


def test_a_deepseek_without_a_latent_of_q_has_to_keep_its_cells_apart(write):
    latent = {**LATENT, "q_lora_rank": None}
    found = found_in(write(mcore("DeepseekV3ForCausalLM", **latent)))
    assert found[0][0] == "error" and "mla_qkv_concat: False" in found[0][2]
    assert found_in(write(mcore("DeepseekV3ForCausalLM", **latent, mla_qkv_concat=False)))[0][0] == "note"


def test_sizes_come_from_the_folder_of_the_model(write, tmp_path):
    folder = tmp_path / "Qwen3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    changes = mcore("Qwen3ForCausalLM")
    changes["model.model_config"] = {"pet_config": changes["model.model_config"]["pet_config"]}
    (finding,) = found_in(write({**changes, "pretrained_model_dir": str(folder), "load_checkpoint": ""}))
    assert finding[2].startswith("LoRA on 8 cells")
    missing = found_in(write({**mcore("Qwen3ForCausalLM"), "pretrained_model_dir": "/nowhere", "load_checkpoint": ""}))
    assert missing[0][:2] == ("error", "pretrained_model_dir")


def test_the_dtypes_of_an_mcore_model_have_its_own_keys_and_defaults(write):
    changes = mcore("Qwen3ForCausalLM", params_dtype="bfloat16", compute_dtype="float16")
    keys = {key for _, key, _ in found_in(write({**changes, "runner_wrapper": {"scale_sense": 2.0}}))}
    assert "model.model_config.compute_dtype" in keys and "model.model_config.param_init_type" not in keys


def test_stacked_weights_of_experts_are_known_by_name(write):
    stacked = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.weight3"]}
    findings = found_in(write(mcore("Qwen3MoeForCausalLM", stacked)))
    assert findings[0][:2] == ("error", f"{PET}.target_parameters")
    assert "names 'mlp.experts.weight3', which matches no stacked weight of experts." in findings[0][2]


@pytest.mark.parametrize(
    "pet",
    [
        {"target_parameters": ["mlp.experts"]},
        {"target_modules": ["linear_proj", "mlp.experts"]},
        {"target_modules": r".*linear_proj|.*experts\.weight[12]"},
    ],
    ids=str,
)
def test_experts_can_be_named_as_a_module_or_in_target_modules(write, pet):
    findings = found_in(write(mcore("Qwen3MoeForCausalLM", pet)))
    assert not [finding for finding in findings if finding[0] == "error"]
    assert any(found.startswith("LoRA on") and "mlp.experts.weight1" in found for _, _, found in findings)


def test_a_pet_config_in_llm_model_is_found_and_named_where_it_is(write):
    pet = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": ".*wq|.*query"}
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96, "vocab_size": 100}
    dtypes = {"compute_dtype": "bfloat16", "param_init_type": "bfloat16"}
    nested = {
        "arch": {"type": "LlamaForCausalLM"},
        "model_config": {"type": "LlamaConfig", **sizes, **dtypes, "pet_config": pet},
    }
    findings = found_in(write({"model.model_config": {"type": "CogVLM2Config", "llm_model": nested}}))
    key = "model.model_config.llm_model.model_config.pet_config.target_modules"
    assert [finding[:2] for finding in findings] == [("warning", key), ("note", key), ("note", key)]
    assert "LoRA on 2 cells" in findings[1][2]
    nested["model_config"]["pet_config"] = {**pet, "lora_rnk": 4}
    (finding,) = found_in(write({"model.model_config": {"type": "CogVLM2Config", "llm_model": nested}}))
    assert finding[:2] == ("error", "model.model_config.llm_model.model_config.pet_config.lora_rnk")


def test_rows_are_compared_with_the_folder_that_describes_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 8}', "utf-8")
    data = tmp_path / "rows.mindrecord"
    data.touch()
    config = {
        "use_legacy": False,
        "run_mode": "finetune",
        "pretrained_model_dir": str(tmp_path),
        "model": {"model_config": {}},
        "train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": str(data)}},
    }

    def found(length, largest):
        row = {"input_ids": np.full(length, largest, np.int32)}
        return [finding.found for finding in check_rows(YamlRun(config), lambda path, count: iter([row]))]

    assert found(4096, 7) == [] and found(4097, 7) == []
    (finding,) = found(100, 7)
    assert "the rows have 100 tokens, and model_config.seq_length 4096 needs 4096 or 4097" in finding
    (finding,) = found(4096, 8)
    assert "the rows hold token 8, and model_config.vocab_size is 8" in finding
    config["model"]["model_config"]["seq_length"] = 100
    assert found(100, 7) == []


def test_a_folder_that_is_to_describe_the_model_must_be_there(tmp_path):
    config = {
        "use_legacy": False,
        "run_mode": "finetune",
        "pretrained_model_dir": str(tmp_path / "nowhere"),
        "model": {"model_config": {"pet_config": {"pet_type": "lora"}}},
    }
    (finding,) = check_mcore(YamlRun(config))
    assert finding.key == "pretrained_model_dir" and "nowhere, where there is no config.json" in finding.found
    assert "--pretrained_model_dir" in finding.advice
