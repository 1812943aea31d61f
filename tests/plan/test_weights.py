"""The parameters that a plan counts are those of the built network: names, shapes, dtypes, bytes."""

import pytest

from mindlora.errors import TargetError
from mindlora.nn.nf4 import parameter_count
from mindlora.plan.memory import memory_of
from mindlora.plan.run import read_run
from mindlora.plan.weights import weights_of
from tests.support import mcore_cpu, mcore_networks, moe_cpu, moe_networks
from tests.support.planned_runs import LORA, TINY, adapted, run_of

PARTS = {"A": "mindpet_delta_lora_a", "B": "mindpet_delta_lora_b", "magnitude": "mindpet_delta_lora_magnitude"}
PARTS |= {"lambda_d": "mindpet_delta_lora_lambda_d", "lambda_b": "mindpet_delta_lora_lambda_b"}
PARTS |= {"lambda": "mindpet_delta_lora_lambda"}
PARTS |= {"shared A": "mindpet_delta_lora_vera_a", "shared B": "mindpet_delta_lora_vera_b"}
BFLOAT16 = {"param_init_type": "bfloat16", "compute_dtype": "bfloat16"}
VERA = {"pet_type": "lora", "lora_rank": 8, "use_vera": True, "target_modules": "all-linear"}

NETWORKS = {
    "grouped queries": ({}, LORA),
    "one key for each query": ({"n_kv_heads": None}, LORA),
    "joined cells": ({"qkv_concat": True}, LORA),
    "tied embeddings": ({"tie_word_embeddings": True}, {**LORA, "target_modules": ".*wq|.*wo"}),
    "biases, as in Qwen2": ({"qkv_has_bias": True, "attn_proj_has_bias": True}, LORA),
    "joined cells with biases": ({"qkv_concat": True, "qkv_has_bias": True}, LORA),
    "inner size from multiple_of": ({"intermediate_size": None, "multiple_of": 24, "ffn_dim_multiplier": 1.3}, LORA),
    "stored in bfloat16": (BFLOAT16, LORA),
    "an embedding in another dtype": ({**BFLOAT16, "embedding_init_type": "float32"}, LORA),
    "embedding and head": ({}, {**LORA, "target_modules": ["wq", "tok_embeddings", "lm_head"]}),
    "Hugging Face's names": ({}, {**LORA, "target_modules": ["q_proj", "down_proj"]}),
    "ranks by pattern": ({}, {**LORA, "rank_pattern": {"wq": 2, "layers.1.feed_forward.w2": 5}}),
    "one layer, some cells": ({}, {**LORA, "layers_to_transform": [1], "exclude_modules": ["w3"]}),
    "DoRA": ({}, {**LORA, "use_dora": True}),
    "VeRA": ({}, VERA),
    "AdaLoRA": ({}, {"pet_type": "lora", "use_adalora": True, "init_r": 12, "target_modules": "all-linear"}),
    "A frozen": ({}, {**LORA, "freeze_lora_a": True}),
    "adapter in float16": ({}, {**LORA, "param_init_type": "float16"}),
    "saved modules": ({}, {**LORA, "modules_to_save": ["lm_head", "attention_norm"]}),
    "more trained, more frozen": (
        {},
        {**LORA, "freeze_exclude": ["*norm_out*"], "freeze_include": ["*layers.0*lora_b"]},
    ),
    "4-bit base": ({}, {**LORA, "quantize_base": "nf4"}),
    "4-bit, joined, with biases": (
        {"qkv_concat": True, "qkv_has_bias": True},
        {**LORA, "quantize_base": "nf4", "quantize_exclude": ["w2"]},
    ),
    "4-bit base with a saved head": ({}, {**LORA, "quantize_base": "nf4", "modules_to_save": ["lm_head"]}),
    "the whole network": ({}, {}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_parameters_are_those_of_the_built_network(name, make_llama):
    model, pet = NETWORKS[name]
    network = adapted(make_llama(**{**TINY, **model, "type": None}), pet)
    weights = weights_of(run_of(model, pet))
    planned = {name_of(weight): (weight.shape, weight.dtype, weight.trained) for weight in weights}
    built = {
        parameter.name: (tuple(parameter.shape), str(parameter.dtype).lower(), parameter.requires_grad)
        for parameter in network.get_parameters()
    }
    assert planned == built
    assert sum(weight.size for weight in weights) == sum(parameter.nbytes for parameter in network.get_parameters())
    assert sum(weight.count for weight in weights) == parameter_count(network)


@pytest.mark.parametrize(
    "keys", [{}, {"tie_word_embeddings": True, "params_dtype": "bfloat16"}, {"attention_bias": True}]
)
def test_the_parameters_are_those_of_the_built_qwen3(keys, mindformers, monkeypatch):
    mcore_cpu.install(monkeypatch.setattr)
    monkeypatch.setattr(mcore_networks, "filled", lambda network, _: network)
    model = {**mcore_networks.TINY, **keys, "type": "Qwen3Config"}
    assert_parameters_of_mcore(model, mcore_networks.tiny_qwen3(**keys))


def test_the_parameters_are_those_of_the_built_qwen3_with_experts(mindformers, monkeypatch):
    moe_cpu.install(monkeypatch.setattr)
    model = {**moe_networks.QWEN3_MOE, "type": "Qwen3MoeConfig"}
    assert_parameters_of_mcore(model, moe_networks.tiny_moe("qwen3_moe"))


def assert_parameters_of_mcore(model, network):
    run = read_run({"run_mode": "finetune", "model": {"model_config": model}})
    built = {p.name: (tuple(p.shape), str(p.dtype).lower()) for p in network.get_parameters()}
    # What routers count, and, in MindFormers 1.8, the states of dropouts: some bytes of each layer.
    counts = {
        name for name, (_, dtype) in built.items() if name.endswith(("fi_accu", "expert_load")) or dtype == "int64"
    }
    assert {weight.name: (weight.shape, weight.dtype) for weight in weights_of(run)} == {
        name: found for name, found in built.items() if name not in counts
    }
    assert memory_of(run).total > sum(weight.size for weight in weights_of(run))


def test_a_4_bit_weight_cannot_be_trained():
    pet = {**LORA, "quantize_base": "nf4", "target_modules": ["wq"], "modules_to_save": ["w2"]}
    with pytest.raises(TargetError, match="w2.weight would be trained and is quantized"):
        weights_of(run_of({}, pet))


def test_a_saved_module_that_is_not_there_is_named():
    with pytest.raises(TargetError, match="modules_to_save names 'gone', which matches no module"):
        weights_of(run_of({}, {**LORA, "modules_to_save": ["gone"]}))


def test_a_module_cannot_be_both_adapted_and_saved():
    with pytest.raises(TargetError, match="modules_to_save names 'wq', and so does target_modules"):
        weights_of(run_of({}, {**LORA, "modules_to_save": ["wq"]}))


def test_adapters_of_routed_experts_are_not_counted_and_said_so():
    with pytest.raises(
        TargetError, match="has target_parameters \\['mlp.experts'\\], and the adapters of routed experts"
    ):
        weights_of(run_of({}, {**LORA, "target_parameters": ["mlp.experts"]}))


def name_of(weight):
    """Returns the name that a parameter has in the network."""
    part = PARTS.get(weight.part, weight.part) if weight.adapter else weight.part
    return f"{weight.path}.{part}".lstrip(".")
