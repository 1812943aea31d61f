"""The size of the adapter's file, to the byte, against the one that save_lora writes."""

import os

import pytest

from mindlora.run.plan.adapter_file import adapter_file_size
from tests.support.planned_runs import LORA, TINY, adapted, run_of

VERA = {"pet_type": "lora", "lora_rank": 8, "use_vera": True, "target_modules": "all-linear"}
MISS = {"pet_type": "lora", "lora_rank": 8, "use_miss": True, "target_modules": "all-linear"}
ADAPTERS = {
    "LoRA": ({}, LORA),
    "twelve layers": ({"num_layers": 12}, {**LORA, "target_modules": ["q_proj", "v_proj"]}),
    "joined cells": ({"qkv_concat": True}, LORA),
    "joined cells with DoRA": ({"qkv_concat": True}, {**LORA, "use_dora": True}),
    "DoRA in float16": ({}, {**LORA, "use_dora": True, "param_init_type": "float16"}),
    "VeRA": ({}, VERA),
    "MiSS": ({}, MISS),
    "joined cells with MiSS": ({"qkv_concat": True}, MISS),
    "ranks by pattern": ({}, {**LORA, "rank_pattern": {"wq": 2}}),
    "embedding and head": ({}, {**LORA, "target_modules": ["wq", "tok_embeddings", "lm_head"]}),
    "saved modules": ({}, {**LORA, "modules_to_save": ["lm_head", "attention_norm"]}),
    "4-bit base": ({}, {**LORA, "quantize_base": "nf4"}),
    "DoRA on a 4-bit base": ({}, {**LORA, "use_dora": True, "quantize_base": "nf4"}),
    "a head alone on a 4-bit base": ({}, {**LORA, "target_modules": ["lm_head"], "quantize_base": "nf4"}),
    "a tied head in another dtype": (
        {"tie_word_embeddings": True, "embedding_init_type": "bfloat16"},
        {**LORA, "target_modules": ["wq", "lm_head"]},
    ),
    "a saved table that is the head too": (
        {"tie_word_embeddings": True},
        {**LORA, "target_modules": ["wq"], "modules_to_save": ["tok_embeddings"]},
    ),
    "adapter in bfloat16": ({}, {**LORA, "param_init_type": "bfloat16"}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_size_is_that_of_the_saved_file(name, make_llama, tmp_path):
    from mindlora import save_lora

    model, pet = ADAPTERS[name]
    network = adapted(make_llama(**{**TINY, **model, "type": None}), pet)
    network.init_parameters_data()
    save_lora(network, str(tmp_path / "adapter"))
    run = run_of(model, pet)
    size = os.path.getsize(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapter_file_size(run) == size


def test_an_initialization_that_changes_the_base_is_saved_at_twice_the_rank(make_llama, tmp_path):
    from mindlora import initialize_adapters, save_lora

    pet = {**LORA, "lora_init": "pissa", "lora_rank": 4}
    network = adapted(make_llama(**{**TINY, "type": None}), pet)
    network.init_parameters_data()
    initialize_adapters(network)
    save_lora(network, str(tmp_path / "adapter"))
    run = run_of({}, pet)
    size = os.path.getsize(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapter_file_size(run) == size


def test_without_an_adapter_there_is_no_file():
    run = run_of({}, {})
    assert adapter_file_size(run) is None
