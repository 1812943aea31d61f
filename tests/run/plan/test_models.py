"""The parameters that a plan counts of models other than the Llama, and the sizes of their adapters' files."""

import os
import re

import pytest

from mindlora.core.errors import ConfigError, TargetError, UnsupportedCellError
from mindlora.run.plan.adapter_file import adapter_file_size
from mindlora.run.plan.memory import kv_cache_per_token, memory_of
from mindlora.run.plan.report import plan_of
from mindlora.run.plan.run import read_run
from tests.support import mcore_networks, moe_networks
from tests.support.chatglm_networks import CHATGLM, chatglm
from tests.support.planned_runs import adapted
from tests.support.predicting_networks import GLM4, QWEN2, tiny_predicting

BFLOAT16 = {"params_dtype": "bfloat16"}
V3 = moe_networks.DEEPSEEK_V3
DENSE_FIRST = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
NO_QUERY_LATENT = {"q_lora_rank": None, "qk_layernorm": True, "use_shared_expert_gating": True}
APART = {"mla_qkv_concat": False, "qk_layernorm": True, "n_shared_experts": 2, "tie_word_embeddings": True}
FURTHER = {"num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.3}
LINEAR = {"pet_type": "lora", "lora_rank": 2, "lora_alpha": 4, "target_modules": "all-linear"}
EXPERTS = {
    **{key: value for key, value in LINEAR.items() if key != "target_modules"},
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
BOTH = {
    **{**EXPERTS, "target_modules": ["linear_proj"], "rank_pattern": {"mlp.experts.down_proj": 3}},
    "modules_to_save": ["router"],
}
# Builder, the class that a YAML names, model_config, and the adapter.
TRAINED = {
    "qwen3": ("qwen3", {}, LINEAR),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, **BFLOAT16}, {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}, LINEAR),
    "qwen3_moe": ("qwen3_moe", {}, EXPERTS),
    "qwen3_moe in 4 bits": ("qwen3_moe", {}, {**EXPERTS, "quantize_base": "nf4"}),
    "deepseek_v3": ("deepseek_v3", DENSE_FIRST, BOTH),
    "deepseek_v3, half of its experts in 4 bits": (
        "deepseek_v3",
        DENSE_FIRST,
        {**LINEAR, "quantize_base": "nf4", "quantize_exclude": ["mlp.experts.down_proj"]},
    ),
    "deepseek_v3 apart": ("deepseek_v3", {**DENSE_FIRST, **APART, "params_dtype": "float16"}, LINEAR),
    "deepseek_v3 without a latent of q": ("deepseek_v3", NO_QUERY_LATENT, {}),
    "deepseek_v3 without shared experts": ("deepseek_v3", {"n_shared_experts": 0, "mla_qkv_concat": False}, EXPERTS),
    "deepseek_v3 with a further token": ("deepseek_v3", FURTHER, LINEAR),
    "deepseek_v3 without biases of experts": ("deepseek_v3", {"moe_router_enable_expert_bias": False}, LINEAR),
    "deepseek_v3 with wider shared experts": ("deepseek_v3", {"moe_shared_expert_intermediate_size": 44}, LINEAR),
}
_CONFIGS = {"qwen3": ("Qwen3Config", mcore_networks.TINY)}
_CONFIGS |= {"qwen3_moe": ("Qwen3MoeConfig", moe_networks.QWEN3_MOE), "deepseek_v3": ("DeepseekV3Config", V3)}
CHATGLMS = {
    "joined": ({}, LINEAR),
    "apart, with all biases, in float16": (
        {"qkv_concat": False, "mlp_concat": False, "add_bias_linear": True, "param_init_type": "float16"},
        LINEAR,
    ),
    "without biases, more norms": (
        {"add_qkv_bias": False, "post_self_attn_layernorm": True, "post_mlp_layernorm": True, "post_layer_norm": False},
        {},
    ),
    "layer norms": ({"rmsnorm": False, "layernorm_compute_type": "float16", "compute_dtype": "float16"}, LINEAR),
    "embedding and head": ({}, {**LINEAR, "target_modules": ["embedding", "output_layer", "query_key_value"]}),
}
PREDICTING = {
    "qwen2": ("qwen2", {}),
    "qwen2 tied, with biases": ("qwen2", {"tie_word_embeddings": True, "add_qkv_bias": True, **BFLOAT16}),
    "qwen2, norms in bfloat16": ("qwen2", {"layernorm_compute_dtype": "bfloat16", "attention_bias": True}),
    "glm4": ("glm4", {}),
    "glm4 tied, without biases": ("glm4", {"tie_word_embeddings": True, "attention_bias": False, **BFLOAT16}),
    "glm4, all biases": ("glm4", {"add_bias_linear": True}),
}


def yaml_of(kind, model, pet, mode="finetune"):
    """Returns the content of a YAML."""
    return {
        "run_mode": mode,
        "model": {"model_config": {**model, "type": kind, **({"pet_config": pet} if pet else {})}},
    }


@pytest.fixture
def mcore(mindformers, monkeypatch):
    """Returns a function from a case of TRAINED to the network with its adapter, and the YAML of the same."""
    monkeypatch.setattr(mcore_networks, "for_a_cpu", lambda network: network)
    monkeypatch.setattr(moe_networks, "for_a_cpu", lambda network: network)
    monkeypatch.setattr(mcore_networks, "filled", lambda network, _: network)
    monkeypatch.setattr(moe_networks, "filled", lambda network, _: network)

    def build(kind, keys, pet):
        network = mcore_networks.tiny_qwen3(**keys) if kind == "qwen3" else moe_networks.tiny_moe(kind, **keys)
        name, sizes = _CONFIGS[kind]
        return adapted(network, pet), yaml_of(name, {**sizes, **keys}, pet)

    return build


@pytest.mark.parametrize("name", TRAINED)
def test_the_parameters_are_those_of_the_built_mcore_model(name, mcore):
    network, config = mcore(*TRAINED[name])
    assert_planned_as_built(network, config)
    assert plan_of(config, "run.yaml", None, [1, 2]).trained == sum(p.size for p in parameters_of(network) if trains(p))


def test_the_parameters_are_those_of_several_adapters_on_experts(mcore):
    own = {"lora_rank": 5, "target_parameters": ["mlp.experts.down_proj"]}
    network, config = mcore("qwen3_moe", {}, {**EXPERTS, "adapters": [{"lora_alpha": 4}, own]})
    config["model"]["model_config"]["architectures"] = "Qwen3MoeForCausalLM"
    run = {"optimizer": {"type": "AdamW"}, "runner_wrapper": {"type": "LoraTrainOneStepCell"}, "use_legacy": False}
    assert_planned_as_built(network, {**config, **run, "runner_config": {"sink_mode": False}})


@pytest.mark.parametrize("name", CHATGLMS)
def test_the_parameters_and_the_cache_are_those_of_the_built_chatglm(name, mindformers):
    keys, pet = CHATGLMS[name]
    network, config = adapted(chatglm(**keys), pet), yaml_of("ChatGLM2Config", {**CHATGLM, **keys}, pet)
    assert_planned_as_built(network, config)
    cache = next(line for line in memory_of(read_run(config)).lines if line.name.startswith("KV cache"))
    assert cache.size == sum(p.nbytes for p in network.get_parameters() if p.name.endswith("_cache"))


@pytest.mark.parametrize("name", PREDICTING)
def test_the_parameters_are_those_of_the_built_model_that_only_predicts(name, mindformers, monkeypatch):
    if mindformers.__version__.startswith("1.8"):
        pytest.skip("MindFormers 1.8 builds networks for prediction on an NPU alone")
    monkeypatch.setenv("RUN_MODE", "predict")
    kind, keys = PREDICTING[name]
    record, sizes = {"qwen2": ("Qwen2Config", QWEN2), "glm4": ("Glm4Config", GLM4)}[kind]
    config = yaml_of(record, {**sizes, **keys}, {}, "predict")
    assert_planned_as_built(tiny_predicting(kind, **keys), config, mode="predict")


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "deepseek_v3 with a further token"])
def test_the_file_s_size_is_that_of_the_saved_one(name, mcore, tmp_path):
    assert_file_size(*mcore(*TRAINED[name]), tmp_path)


def test_the_file_s_size_is_that_of_a_saved_chatglm_s(mindformers, tmp_path):
    assert_file_size(adapted(chatglm(), LINEAR), yaml_of("ChatGLM2Config", CHATGLM, LINEAR), tmp_path)


def test_the_file_s_size_of_parts_that_are_saved_as_one_is_not_known():
    model = {**CHATGLM, "qkv_concat": False}
    report = plan_of(yaml_of("ChatGLM2Config", model, LINEAR), "run.yaml", None, [1])
    assert report.adapter_file is None and any("are saved as one" in note for note in report.notes)


def test_the_cache_of_latent_attention_holds_the_latent_and_the_rotated_part():
    run = read_run(yaml_of("DeepseekV3Config", {**V3, **DENSE_FIRST, "compute_dtype": "bfloat16"}, {}))
    assert kv_cache_per_token(run) == 2 * 2 * (V3["kv_lora_rank"] + V3["qk_rope_head_dim"])


def test_layers_that_predict_further_tokens_are_on_the_last_stage_and_said_to_be_counted_in_part():
    config = yaml_of("DeepseekV3Config", {**V3, **DENSE_FIRST, **FURTHER}, LINEAR)
    assert any("further tokens" in note for note in plan_of(config, "run.yaml", None, [1]).notes)
    nodes = {"use_parallel": True, "parallel": {"parallel_mode": 1}, "parallel_config": {"pipeline_stage": 2}}
    assert memory_of(read_run({**config, **nodes})).stage == 1


def test_adapters_of_experts_are_divided_with_them():
    config = yaml_of("Qwen3MoeConfig", {**moe_networks.QWEN3_MOE, "architectures": "Qwen3MoeForCausalLM"}, EXPERTS)
    nodes = {"use_parallel": True, "parallel": {"parallel_mode": 1}, "use_legacy": False}
    nodes["parallel_config"] = {"data_parallel": 2, "expert_parallel": 2}
    whole, half = (
        {line.name: line.size for line in memory_of(read_run(own)).lines} for own in (config, {**config, **nodes})
    )
    assert whole["adapter"] == 2 * half["adapter"] > 0


@pytest.mark.parametrize("module", ["linear_qkv", "linear_proj"])
def test_a_saved_module_that_the_run_refuses_is_refused_in_the_same_words(module, mcore):
    pet = {**LINEAR, "target_modules": ["linear_proj"], "modules_to_save": [module]}
    network, config = mcore("qwen3", {}, {})
    config["model"]["model_config"]["pet_config"] = pet
    with pytest.raises(TargetError) as refused:
        adapted(network, pet)
    with pytest.raises(TargetError, match=re.escape(str(refused.value))):
        list(read_run(config).weights)


@pytest.mark.parametrize(
    "pet, message",
    [
        ({**EXPERTS, "target_parameters": ["mlp.gone"]}, "target_parameters names 'mlp.gone', which matches no"),
        ({**EXPERTS, "use_dora": True}, "use_dora is not supported on stacked experts"),
        ({**EXPERTS, "lora_dropout": 0.1}, "lora_dropout is not supported on stacked experts"),
        (
            {**EXPERTS, "quantize_base": "nf4", "lora_init": "loftq"},
            "lora_init 'loftq' is not supported on stacked experts",
        ),
        ({**LINEAR, "target_modules": ["nowhere"]}, "target_modules .* matches no linear cell"),
    ],
)
def test_what_experts_cannot_have_is_an_error(pet, message):
    with pytest.raises((TargetError, UnsupportedCellError), match=message):
        list(read_run(yaml_of("Qwen3MoeConfig", moe_networks.QWEN3_MOE, pet)).weights)


def test_a_model_that_only_predicts_is_not_planned_for_training():
    with pytest.raises(ConfigError, match="run_mode is 'finetune', and MindFormers has GLM4 for prediction alone"):
        read_run(yaml_of("Glm4Config", GLM4, LINEAR))


def parameters_of(network):
    """Returns the parameters without caches, what routers count, and MindFormers 1.8's states of dropouts."""
    uncounted = ("fi_accu", "expert_load", "key_cache", "value_cache")
    return [
        p for p in network.get_parameters() if not p.name.endswith(uncounted) and not str(p.dtype).startswith("Int")
    ]


def trains(parameter):
    return parameter.requires_grad


def assert_planned_as_built(network, config, mode="finetune"):
    run, built = read_run(config), parameters_of(network)
    weights = run.weights
    assert {weight.name: (weight.shape, weight.dtype) for weight in weights} == {
        p.name: (tuple(p.shape), str(p.dtype).lower()) for p in built
    }
    assert sum(weight.size for weight in weights) == sum(p.nbytes for p in built)
    if mode == "finetune":
        assert {weight.name for weight in weights if weight.trained} == {p.name for p in built if trains(p)}
    assert memory_of(run).total > sum(weight.size for weight in weights)


def assert_file_size(network, config, tmp_path):
    from mindlora import save_lora

    network.init_parameters_data()
    save_lora(network, str(tmp_path / "adapter"))
    run = read_run(config)
    size = os.path.getsize(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapter_file_size(run) == size
