"""The parameters that a plan counts are those of the built network: names, shapes, dtypes, bytes."""

import pytest

from mindlora.core.errors import ConfigError, TargetError, UnsupportedCellError
from mindlora.network.load_base import hold_base
from mindlora.network.quantized.nf4 import parameter_count
from tests.support import held_bases
from tests.support.planned_runs import LORA, TINY, adapted, run_of

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
    "MiSS": ({}, {"pet_type": "lora", "lora_rank": 8, "use_miss": True, "target_modules": "all-linear"}),
    "AdaLoRA": ({}, {"pet_type": "lora", "use_adalora": True, "init_r": 12, "target_modules": "all-linear"}),
    "A frozen": ({}, {**LORA, "freeze_lora_a": True}),
    "adapter in float16": ({}, {**LORA, "param_init_type": "float16"}),
    "saved modules": ({}, {**LORA, "modules_to_save": ["lm_head", "attention_norm"]}),
    "more trained, more frozen": (
        {},
        {**LORA, "freeze_exclude": ["*norm_out*"], "freeze_include": ["*layers.0*lora_b"]},
    ),
    "A frozen, and trained all the same": ({}, {**LORA, "freeze_lora_a": True, "freeze_exclude": ["*wk.*lora_a"]}),
    "frozen and excluded at once": (
        {},
        {**LORA, "modules_to_save": ["lm_head"], "freeze_include": ["lm_head*"], "freeze_exclude": ["lm_head*"]},
    ),
    "4-bit base": ({}, {**LORA, "quantize_base": "nf4"}),
    "4-bit, joined, with biases": (
        {"qkv_concat": True, "qkv_has_bias": True},
        {**LORA, "quantize_base": "nf4", "quantize_exclude": ["w2"]},
    ),
    "4-bit base with a saved head": ({}, {**LORA, "quantize_base": "nf4", "modules_to_save": ["lm_head"]}),
    "the whole network": ({}, {}),
}
# The same variants on a base in 4 bits.
NETWORKS.update(
    {
        f"{name} on a 4-bit base": ({}, {**NETWORKS[name][1], "quantize_base": "nf4"})
        for name in ("DoRA", "VeRA", "MiSS", "AdaLoRA")
    }
)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_parameters_are_those_of_the_built_network(name, make_llama):
    model, pet = NETWORKS[name]
    network = adapted(make_llama(**{**TINY, **model, "type": None}), pet)
    weights = run_of(model, pet).weights
    planned = {weight.name: (weight.shape, weight.dtype, weight.trained) for weight in weights}
    built = {
        parameter.name: (tuple(parameter.shape), str(parameter.dtype).lower(), parameter.requires_grad)
        for parameter in network.get_parameters()
    }
    assert planned == built
    assert sum(weight.size for weight in weights) == sum(parameter.nbytes for parameter in network.get_parameters())
    assert sum(weight.count for weight in weights) == parameter_count(network)


def test_a_4_bit_weight_cannot_be_trained():
    pet = {**LORA, "quantize_base": "nf4", "target_modules": ["wq"], "modules_to_save": ["w2"]}
    with pytest.raises(TargetError, match="modules_to_save names .*w2.weight, which quantize_base would quantize"):
        list(run_of({}, pet).weights)


def test_a_saved_module_that_is_not_there_is_named():
    with pytest.raises(TargetError, match="modules_to_save names 'gone', which matches no module"):
        list(run_of({}, {**LORA, "modules_to_save": ["gone"]}).weights)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"freeze_include": ["*lambda*"]}, r"freeze_include pattern '\*lambda\*' matches no parameter"),
        ({"freeze_include": ["*"]}, "freezes everything"),
        ({"target_modules": ["wq", "tok_embeddings"], "use_dora": True}, "use_dora is not supported on embeddings"),
        (
            {"target_modules": ["tok_embeddings"], "lora_init": "olora"},
            "lora_init 'olora' is not supported on embeddings",
        ),
    ],
)
def test_what_no_network_takes_is_not_planned(keys, message):
    with pytest.raises((TargetError, UnsupportedCellError), match=message):
        list(run_of({}, {**LORA, **keys}).weights)


def test_vera_on_cells_that_no_file_could_hold_is_not_planned():
    vera = {**VERA, "exclude_modules": ["lm_head"]}
    with pytest.raises(ConfigError, match=r"use_vera is True, and .*attention\.w_qkv, .* do the work"):
        list(run_of({"qkv_concat": True}, vera).weights)
    assert any(
        weight.part == "lambda_b" for weight in run_of({"qkv_concat": True}, {**vera, "target_modules": ["wo"]}).weights
    )


def test_prediction_trains_nothing():
    assert not any(weight.trained for weight in run_of({}, LORA, run_mode="predict").weights)


def test_a_module_cannot_be_both_adapted_and_saved():
    with pytest.raises(TargetError, match="modules_to_save names 'wq', and so does target_modules"):
        list(run_of({}, {**LORA, "modules_to_save": ["wq"]}).weights)


def test_an_adapter_that_changed_its_base_when_it_was_made_is_loaded_at_twice_the_rank():
    pissa = {**LORA, "lora_init": "pissa", "target_modules": ["layers.0.attention.wq"]}
    for path, rank in ((None, 8), ("adapter", 16)):
        (a,) = (weight for weight in run_of({}, {**pissa, "adapter_path": path}).weights if weight.part == "A")
        assert a.shape == (rank, 32)


@pytest.mark.parametrize("joined", [False, True])
def test_a_base_as_it_is_stored_is_counted_in_the_bits_of_its_file(joined, make_llama, tmp_path):
    path, _, _ = held_bases.save_bases(tmp_path, "llama", "gptq")
    model = {**held_bases.node("llama")["model_config"], "qkv_concat": joined}
    pet = {**LORA, "quantize_base": "as_stored"}
    run = run_of(model, pet, load_checkpoint=path)
    network = make_llama(**{**model, "type": None})
    hold_base(network, path)
    adapted(network, pet)
    planned = {weight.name: (weight.shape, weight.dtype, weight.trained) for weight in run.weights}
    built = {
        parameter.name: (tuple(parameter.shape), str(parameter.dtype).lower(), parameter.requires_grad)
        for parameter in network.get_parameters()
    }
    assert planned == built
    assert sum(weight.count for weight in run.weights) == parameter_count(network)


def test_without_its_file_a_base_as_it_is_stored_is_not_planned():
    with pytest.raises(ConfigError, match="which gives the form of the weights"):
        list(run_of({}, {**LORA, "quantize_base": "as_stored"}).weights)
