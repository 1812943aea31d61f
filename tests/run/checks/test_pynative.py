"""mindlora doctor on YAMLs of MindFormers 2's PyNative trainer."""

import json

import numpy as np
import pytest
import yaml

from mindlora.cli.doctor import examination
from mindlora.files.adapters.dialects.pynative import target_regex
from mindlora.run.checks.pynative import (
    adaptable_cells,
    check_pynative,
    check_weights,
    is_pynative,
    network_of,
    processes_of_a_model,
    select,
)
from tests.support.step_folders import MANIFEST, write_step

MODEL = {
    "model_type": "deepseek_v3",
    "architectures": "DeepseekV3ForCausalLM",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 5,
    "num_nextn_predict_layers": 0,
}
LORA = {"target_modules": r"linear_proj$|mlp\.experts$", "lora_rank": 2, "lora_alpha": 4}
ATTENTION = "decoder.layers.{0..1}.self_attention."


def config_of(checkpoint=None, model=None, **lora):
    return {
        "training": {"steps": 2},
        "optimizer": {"weight_decay": 0.0},
        "model": {**MODEL, **(model or {})},
        "checkpoint": checkpoint or {},
        "lora_config": {**LORA, **lora},
    }


def found_in(config, version=(2, 1)):
    return [
        (finding.severity, finding.key.rpartition(".")[2], str(finding)) for finding in check_pynative(config, version)
    ]


def the_one(config, version=(2, 1)):
    (finding,) = found_in(config, version)
    return finding


@pytest.mark.parametrize(
    "nodes, key, said",
    [
        ({"pet_config": {"lora_rnak": 4}}, "pet_config", "unknown key 'lora_rnak'. Did you mean 'lora_rank'?"),
        ({"pet_config": {"lora_rank": 8}}, "pet_config", "pet_config.lora_rank is 8 and lora_config.lora_rank is 2"),
        ({"pet_config": {"adapters": [{"name": "a/b"}]}}, "adapters", "must be the name of a folder"),
        ({"pet_config": {"use_adalora": True, "target_r": 1, "tfinal": 2}}, "pet_config", "leave none of the run's 2"),
        ({"callbacks": [{"type": "EachAdapter"}]}, "callbacks", "callbacks has EachAdapter, which mindlora adds"),
        ({"runner_wrapper": {"type": "LoraTrainOneStepCell"}}, "runner_wrapper", "Remove it: the Trainer builds"),
        ({"preference": {"loss": "reward"}}, "preference", "the loss reward needs one score of a text"),
        ({"checkpoint": {}, "pet_config": {"use_dora": True, "use_miss": True}}, "pet_config", "use_miss is True"),
    ],
)
def test_what_mindlora_would_refuse_is_an_error(nodes, key, said):
    config = {**config_of(target_modules="linear_proj$"), **nodes}
    errors = [finding for finding in found_in(config) if finding[0] == "error"]
    assert [finding[1] for finding in errors] == [key] and said in errors[0][2]


@pytest.fixture
def base(tmp_path):
    """A step of one rank with all weights of the model and an adapter as LORA says, and no optimizer's state."""
    sizes = network_of(MODEL).parameters
    tensors = {name: np.zeros(size.shape, np.float32) for name, size in sizes.items()}
    for layer in range(2):
        path = f"decoder.layers.{layer}.self_attention.linear_proj"
        tensors |= {f"{path}.lora_a": np.ones((2, 8), np.float32), f"{path}.lora_b": np.ones((8, 2), np.float32)}
    for weight, (inputs, outputs) in {"weight1": (8, 10), "weight2": (5, 8)}.items():
        holder = f"decoder.layers.1.mlp.experts.{weight}"
        tensors[f"{holder}_lora_a"] = np.ones((2, inputs, 2), np.float32)
        tensors[f"{holder}_lora_b"] = np.ones((2, 2, outputs), np.float32)
        tensors[holder] = tensors[holder].reshape(2, inputs, outputs)
    # As the trainer calls it.
    tensors["decoder.layers.1.mlp.expert_bias"] = tensors.pop("decoder.layers.1.mlp.router.expert_bias")
    return tensors, tmp_path / "base"


def loading(base, **checkpoint):
    tensors, folder = base
    path = write_step(folder, tensors, **checkpoint.pop("manifest", {}))
    return {"load_path": path, "no_load_optim": True, **checkpoint}


def test_a_yaml_is_the_trainers_or_graph_modes():
    assert is_pynative(config_of())
    assert is_pynative({"training": {}, "model": {"model_type": "qwen3"}})
    assert not is_pynative({"training": {}, "model": {"model_config": {}}})
    assert not is_pynative({"model": {"model_config": {"pet_config": {}}}, "runner_config": {}})


def test_nothing_is_wrong_with_a_right_one(base):
    (finding,) = found_in(config_of(loading(base)))
    assert finding[:2] == ("warning", "lora_alpha") and "does not say with which lora_alpha" in finding[2]


def test_the_doctor_reads_it(tmp_path, base):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of(loading(base), target_modules="^decoder")))
    findings = examination.check_yaml(str(path))
    assert [finding.severity for finding in findings] == ["error", "warning"]
    assert "Paths begin with model.decoder, so ^decoder matches none" in str(findings[0])


# lora_config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora, key, words",
    [
        ({"use_rslora": True}, "use_rslora", "is not known to the trainer"),
        ({"lora_rank": 0}, "lora_rank", "lora_rank is 0; it must be a whole number"),
        ({"lora_alpha": 4.5}, "lora_alpha", "lora_alpha is 4.5; the trainer takes a whole number"),
        ({"lora_alpha": 0}, "lora_alpha", "lora_alpha is 0"),
        ({"target_modules": ["linear_qkv"]}, "target_modules", "Join several names with |"),
        ({"target_modules": ""}, "target_modules", "it must be one regular expression"),
        ({"target_modules": "(linear"}, "target_modules", "is not a regular expression"),
        ({"exclude_layers": 3}, "exclude_layers", "it must be one regular expression"),
        ({"target_modules": "wq"}, "target_modules", "matches no cell"),
        ({"target_modules": "linear", "exclude_layers": "layers"}, "target_modules", "matches no cell"),
    ],
)
def test_wrong_settings_of_lora_are_errors(lora, key, words):
    severity, found, text = found_in(config_of({"load_path": "x"}, **lora))[0]
    assert (severity, found) == ("error", key) and words in text


@pytest.mark.parametrize("key", ["model", "lora_config", "checkpoint", "optimizer"])
def test_nodes_of_another_kind_are_errors(key):
    assert the_one({**config_of(), key: "x"})[:2] == ("error", key)


def test_an_exclusion_of_nothing_is_noticed(base):
    assert found_in(config_of(loading(base), exclude_layers="wq"))[0][:2] == ("warning", "exclude_layers")


def test_weight_decay_on_a_and_b(base):
    config = config_of(loading(base, manifest=LORA, base_load_path=str(base[1])))
    assert found_in(config) == []
    for optimizer, kind, words in [
        ({}, "warning", "0.01 pulls A and B to zero too (the default"),
        ({"weight_decay": 0.1}, "note", "0.1 pulls"),
    ]:
        severity, key, text = the_one({**config, "optimizer": optimizer})
        assert (severity, key) == (kind, "weight_decay") and words in text
    assert found_in({**config, "optimizer": {"weight_decay_exclude": ["lora_a", "lora_b"]}}) == []


def test_parts_of_a_step_that_count_alike():
    assert not [*check_weights(1, 8), *check_weights(4, 1)]
    (finding,) = check_weights(2, 8)
    assert finding.severity == "warning" and "8 parts, which MindFormers weighs alike" in str(finding)


def test_among_how_many_processes_a_model_is_divided():
    assert processes_of_a_model({}, 1) == 1
    assert processes_of_a_model({}, 8) == 8
    assert processes_of_a_model({"data_parallel_shard": 1}, 8) == 1
    assert processes_of_a_model({"data_parallel_shard": 2}, 8) == 2
    assert processes_of_a_model({"data_parallel_shard": 1, "tensor_parallel": 2, "context_parallel": 2}, 8) == 4


# Cells ----------------------------------------------------------------------------------------------------------------


def selected(target, exclude=None, **model):
    return select(adaptable_cells(network_of({**MODEL, **model})), target, exclude)


def test_cells_are_searched_as_the_trainer_does():
    assert selected("linear_fc1").cells == [
        "decoder.layers.0.mlp.linear_fc1",
        "decoder.layers.1.mlp.shared_experts.linear_fc1",
    ]
    assert selected("layers", r"\.mlp$|linear_q").cells == [
        f"decoder.layers.{layer}.self_attention.{cell}" for layer in (0, 1) for cell in ("linear_proj", "linear_kvb")
    ]
    assert selected(r"^model\.decoder\.layers\.1\.mlp\.experts$").cells == ["decoder.layers.1.mlp.experts"]
    assert selected("^decoder").cells == []
    assert selected(r"^model\.output_layer$").cells == ["output_layer"]


@pytest.mark.parametrize(
    "target, leaked",
    [
        ("linear_fc1", ["0.mlp.linear_fc2", "1.mlp.shared_experts.linear_fc2"]),
        ("linear_fc1$", []),
        ("linear_fc2", []),
        (r"^model\..*linear_fc1", []),
        ("linear_proj", ["0.self_attention.linear_qb", "1.self_attention.linear_qb"]),
        ("linear_qkv", ["0.self_attention.linear_kvb", "1.self_attention.linear_kvb"]),
    ],
)
def test_what_mindformers_2_0_adapts_besides(target, leaked, base):
    """tests/training/pynative/test_files.py holds this to the cells that MindFormers 2.0 itself adapts."""
    assert selected(target).leaked == [f"decoder.layers.{path}" for path in leaked]
    findings = found_in(config_of(loading(base), target_modules=target), (2, 0))
    assert any("2.0 adapts" in text for _, _, text in findings) == bool(leaked)
    assert not any("2.0 adapts" in text for _, _, text in found_in(config_of({"load_path": str(base[1])}), (2, 1)))


def test_what_mindformers_2_0_leaves_out(base):
    target = r"^model\.decoder\.layers\.\d\.self_attention\.(linear_proj|linear_qkv|linear_qb)$"
    # linear_qb comes after linear_proj and is missed, so linear_qkv is searched under linear_proj too.
    missed = [f"decoder.layers.{layer}.self_attention.linear_{cell}" for layer in (0, 1) for cell in ("qb", "qkv")]
    assert selected(target).missed == missed
    findings = found_in(config_of(loading(base), target_modules=target), (2, 0))
    assert any(f"2.0 leaves {ATTENTION}linear_qb, {ATTENTION}linear_qkv out" in text for _, _, text in findings)
    bridge = {"auto_register": "pynative_bridge.Adapters"}
    with_mindlora = found_in(config_of({"load_path": str(base[1])}, bridge, target_modules=target), (2, 0))
    assert not any("2.0 leaves" in text for _, _, text in with_mindlora)


def test_what_mindlora_writes_selects_the_same_in_both():
    cells = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.shared_experts.linear_fc1"]
    cells = [f"decoder.layers.{n}.self_attention.linear_{cell}" for n in (0, 1) for cell in ("proj", "qkv")] + cells
    found = selected(target_regex(cells))
    assert sorted(found.cells) == sorted(found.in_2_0) == sorted(cells)


def test_mindformers_2_0_adapts_no_routed_experts(base):
    texts = [text for _, _, text in found_in(config_of(loading(base)), (2, 0))]
    assert any("2.0 puts no LoRA on routed experts: decoder.layers.1.mlp.experts get none" in text for text in texts)


def test_of_a_model_that_is_not_known_the_cells_are_not_judged(base):
    checkpoint = loading(base)
    unknown = {"model_type": "deepseek_v4", "architectures": "DeepseekV4ForCausalLM"}
    for model in (unknown, {"hidden_size": "x"}):
        assert the_one(config_of(checkpoint, model, target_modules="wq"))[:2] == ("warning", "lora_alpha")


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["load_path", "base_load_path"])
def test_a_path_with_nothing_there_is_an_error(tmp_path, key):
    for path in (tmp_path / "absent", tmp_path):
        severity, found, text = the_one(config_of({key: str(path)}))
        assert (severity, found) == ("error", key) and "would go on with random weights" in text


def test_a_run_without_a_checkpoint_begins_with_random_weights():
    assert the_one(config_of())[:2] == ("warning", "load_path")
    assert "as the memory was" in found_in(config_of(target_modules="linear_proj$"), (2, 0))[-1][2]


def test_keys_of_2_1_are_errors_in_2_0():
    findings = found_in(config_of({"save_trainable_only": True}), (2, 0))
    assert findings[0][:2] == ("error", "save_trainable_only")
    assert found_in(config_of({"save_trainable_only": True}))[0][:2] == ("error", "base_load_path")


def test_what_the_trainer_reads_beside_the_tensors(base):
    config = config_of(loading(base, no_load_optim=False))
    (base[1] / "common.json").unlink()
    (base[1] / "checkpoint-opt-0000000-0000001.safetensors").unlink()
    found = [finding[:2] for finding in found_in(config)]
    assert found[:2] == [("error", "load_path"), ("error", "no_load_optim")]


def test_an_adapter_alone_needs_its_base(base):
    tensors, folder = base
    adapter = {name: array for name, array in tensors.items() if "lora" in name}
    path = write_step(folder.parent / "adapter", adapter, **LORA)
    findings = found_in(config_of({"load_path": path, "no_load_optim": True}))
    assert [finding[:2] for finding in findings] == [("error", "base_load_path"), ("error", "load_path")]
    base_path = write_step(folder, {name: array for name, array in tensors.items() if name not in adapter})
    assert found_in(config_of({"load_path": path, "base_load_path": base_path, "no_load_optim": True})) == []


@pytest.mark.parametrize(
    "key, value",
    [
        ("use_rslora", True),
        ("rank_pattern", {"proj": 4}),
        ("alpha_pattern", {"proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("freeze_exclude", ["*norm*"]),
    ],
)
def test_an_adapter_alone_is_a_and_b_of_one_scale(base, key, value):
    """MindFormers' manifest beside it knows lora_alpha and lora_rank alone."""
    loaded = loading(base, manifest=LORA)
    loaded["base_load_path"] = loaded["load_path"]
    alone = {**loaded, "save_trainable_only": True}
    severity, name, text = found_in({**config_of(alone), "pet_config": {key: value}})[0]
    assert (severity, name) == ("error", key) and "LoraCheckpoint saves the adapter alone" in text
    assert found_in({**config_of(alone), "pet_config": {"lora_init": "gaussian"}}) == []
    # Without it, that it was trained with another scale is only noticed.
    elsewhere = [finding[:2] for finding in found_in({**config_of(loaded), "pet_config": {key: value}})]
    assert elsewhere == ([] if key in ("modules_to_save", "freeze_exclude") else [("warning", key)])


def test_an_adapter_of_a_path_is_the_only_one_that_is_loaded(base):
    loaded = loading(base)
    config = {**config_of(loaded), "pet_config": {"adapter_path": loaded["load_path"]}}
    assert [finding[:2] for finding in found_in(config) if finding[0] == "error"] == [("error", "adapter_path")]
    config["pet_config"]["adapter_path"] = "nowhere"
    config["checkpoint"]["no_load_optim"] = False
    errors = [finding for finding in found_in(config) if finding[0] == "error"]
    assert [finding[1] for finding in errors] == ["adapter_path"] and "nowhere does not exist" in errors[0][2]


def test_a_checkpoint_of_a_changed_base_goes_with_the_lora_init_that_changed_it(base):
    def run(tensors, name, lora_init, **checkpoint):
        path = write_step(base[1].parent / name, tensors, **LORA)
        loaded = {"load_path": path, "base_load_path": path, "no_load_optim": True, **checkpoint}
        return {**config_of(loaded), "pet_config": {"lora_init": lora_init}}

    cell = ATTENTION.replace("{0..1}", "0") + "linear_proj"
    changed = base[0] | {f"{cell}.initial_lora_{half}": base[0][f"{cell}.lora_{half}"] for half in "ab"}
    assert found_in(run(changed, "both", "pissa")) == []
    assert "has changed its base. Set lora_init to that of the run" in the_one(run(changed, "forgotten", None))[2]
    assert "holds an adapter of another one" in the_one(run(base[0], "later", "olora"))[2]
    alone = run(changed, "alone", "pissa", save_trainable_only=True)
    assert "leaves out the base, which lora_init changes" in the_one(alone)[2]


def test_hugging_faces_form_is_not_loaded(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    severity, _, text = the_one(config_of({"load_path": str(tmp_path)}))
    assert severity == "warning" and "mindlora base convert" in text
    assert the_one(config_of({"load_path": str(tmp_path / "model.safetensors")}))[2].endswith("folder that it is in.")


def test_weights_that_the_base_lacks_or_has_in_another_shape(base):
    del base[0]["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"]
    config = config_of(loading(base))
    assert "lacks decoder.layers.1.mlp.shared_experts.linear_fc1.weight: these" in found_in(config)[-1][2]
    base[0]["decoder.final_layernorm.weight"] = np.zeros(9, np.float32)
    path = write_step(base[1].parent / "other", base[0])
    assert "of shape [9], but the model has it of [8]" in found_in(config_of({"load_path": path}))[-1][2]


@pytest.mark.parametrize(
    "lora, severity, key, words",
    [
        ({"lora_alpha": 400}, "warning", "lora_alpha", "was trained with lora_alpha 4, but lora_alpha is 400"),
        ({"lora_rank": 3}, "error", "lora_rank", "holds an adapter of rank 2, but lora_rank is 3"),
        (
            {"target_modules": r"linear_proj$|linear_kvb$|mlp\.experts$"},
            "warning",
            "target_modules",
            f"has no A and B for {ATTENTION}linear_kvb, which begin anew",
        ),
        (
            {"target_modules": "linear_proj$"},
            "error",
            "target_modules",
            "holds A and B for decoder.layers.1.mlp.experts, which target_modules does not select",
        ),
    ],
)
def test_another_adapter_than_the_one_resumed_from(base, lora, severity, key, words):
    found = the_one(config_of(loading(base, manifest=LORA, base_load_path=str(base[1])), **lora))
    assert found[:2] == (severity, key) and words in found[2]


@pytest.mark.parametrize(
    "fields, parts, key, words",
    [
        ({}, ("lora_a", "lora_b", "magnitude_lora_b"), "use_dora", "an adapter of DoRA, but this run trains LoRA"),
        ({}, ("miss_block_lora_b",), "use_miss", "an adapter of MiSS, but this run trains LoRA"),
        ({"use_vera": True}, ("lora_a", "lora_b"), "use_vera", "an adapter of LoRA, but this run trains VeRA"),
    ],
)
def test_another_variant_than_the_one_resumed_from(base, fields, parts, key, words):
    tensors, folder = base
    tensors = {name: array for name, array in tensors.items() if "lora" not in name}
    tensors |= {f"{ATTENTION}linear_proj.{part}": np.ones((2, 2), np.float32) for part in parts}
    found = the_one({**config_of(loading((tensors, folder))), "pet_config": fields})
    assert found[:2] == ("error", key) and words in found[2]


@pytest.mark.parametrize(
    "changes, key, words",
    [
        ({"lora_config": {**LORA, "lora_alpha": 400}}, "lora_alpha", "lora_alpha 4, but lora_alpha is 400"),
        ({"pet_config": {}}, "use_rslora", "use_rslora True, but use_rslora is False"),
    ],
)
def test_another_scale_than_that_of_the_run_that_mindlora_trained(base, changes, key, words):
    config = {**config_of(loading(base)), "pet_config": {"use_rslora": True}}
    trained = {"lora_config": LORA, "pet_config": {"use_rslora": True}, "callbacks": {}}
    (base[1] / "mindlora_run.json").write_text(json.dumps(trained))
    assert found_in(config) == []
    found = the_one({**config, **changes})
    assert found[:2] == ("warning", key) and words in found[2]


def test_a_damaged_checkpoint_is_an_error(base):
    config = config_of(loading(base, manifest=LORA, base_load_path=str(base[1])))
    (base[1] / MANIFEST).write_text(json.dumps([1]))
    assert "instead of a JSON object" in the_one(config)[2]
    (base[1] / "metadata.json").write_text("{")
    assert "is not JSON" in the_one(config)[2]
