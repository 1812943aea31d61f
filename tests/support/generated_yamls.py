"""Random pet_configs for small models, sensible ones and others, the same from the same seed."""

import random

# What a YAML may name of a model: cells, saved modules, and shell-style patterns of parameters.
_LLAMA = {
    "cells": ["wq", "q_proj", "attention.wo", "w2", "down_proj", "lm_head", "tok_embeddings", "w1", "w3", "norm_out"],
    "regexes": [".*wq|.*wk|.*wv", ".*w1|.*w3", ".*", ".*wo|.*gone", r"model\.layers\.1\..*w2", ".*attention.*"],
    "modules": ["lm_head", "attention_norm", "input_layernorm", "wo", "norm_out", "embed_tokens", "attention", "gone"],
    "parameters": ["*norm_out*", "*layers.0*lora_b", "*lora_a", "*wq*", "*attention_norm.weight", "lm_head*", "*"],
}
_MCORE = {
    "cells": ["linear_qkv", "linear_proj", "o_proj", "linear_fc2", "q_proj", "output_layer", "word_embeddings", "gone"],
    "regexes": [".*linear_proj|.*linear_fc1", ".*linear.*", ".*", r"model\.decoder\.layers\.0.*proj", ".*layernorm"],
    "modules": ["output_layer", "lm_head", "linear_qkv", "q_norm", "linear_proj", "input_layernorm", "norm", "mlp"],
    "parameters": ["*layernorm*", "*lora_b", "*linear_proj*", "decoder.layers.0*weight", "output_layer*", "*gone*"],
}
_EXPERTS = {
    "cells": [*_MCORE["cells"], "experts", "router", "mlp.experts.weight1", "down_proj"],
    "regexes": [*_MCORE["regexes"], ".*experts.*", ".*linear_proj|.*weight2"],
    "modules": [*_MCORE["modules"], "router", "mlp.gate", "experts", "mlp.experts"],
    "parameters": [*_MCORE["parameters"], "*router*", "*experts*", "*weight1*", "*expert_bias"],
    "stacks": ["mlp.experts", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "weight1", "mlp.gone"],
}
_LATENT = {
    **_EXPERTS,
    "cells": [*_EXPERTS["cells"], "linear_qb", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "shared_experts.hidden"],
    "regexes": [*_EXPERTS["regexes"], ".*shared_experts.*", ".*linear_q.*"],
}
NAMES = {"llama": _LLAMA, "qwen3": _MCORE, "qwen3_moe": _EXPERTS, "deepseek_v3": _LATENT}
NAMES["chatglm"] = {
    "cells": ["query_key_value", "dense", "dense_4h_to_h", "output_layer", "embedding", "wq", "dense_left", "gone"],
    "regexes": [".*query.*|.*wq|.*wk|.*wv", ".*dense.*", ".*", ".*h_to_4h|.*layernorm"],
    "modules": ["output_layer", "input_layernorm", "query_key_value", "dense", "embedding", "gone"],
    "parameters": ["*layernorm*", "*lora_b", "*dense.*", "*output_layer*", "*gone*"],
}
_VARIANTS = [{}, {}, {}, {"use_dora": True}, {"use_vera": True}, {"use_adalora": True, "init_r": 4}, {"use_miss": True}]
_VARIANTS += [{"freeze_lora_a": True}, {"use_rslora": True}]
_INITIALIZERS = ["gaussian", "orthogonal", "pissa", "olora", "mica", "loftq"]


def pet_config(model, rng):
    """Returns a pet_config, of which MindFormers or mindlora may refuse anything.

    Args:
        model (str): One of NAMES.
        rng (random.Random): Source of the choices.
    """
    names = NAMES[model]

    def some(kind, most=2):
        return rng.sample(names[kind], rng.randint(1, most))

    pet = {"pet_type": "lora", **rng.choice(_VARIANTS)}
    if "use_adalora" not in pet:
        pet["lora_rank"] = rng.choice([2, 4, 3])
    if "stacks" in names and rng.random() < 0.4:
        pet["target_parameters"] = some("stacks", 2)
    if "target_parameters" not in pet or rng.random() < 0.5:
        targets = ["all-linear", "all-linear", rng.choice(names["regexes"]), some("cells"), some("cells", 1)]
        pet["target_modules"] = rng.choice(targets)
    optional = {
        "exclude_modules": lambda: rng.choice([some("cells", 1), rng.choice(names["regexes"])]),
        "modules_to_save": lambda: some("modules", 2),
        "freeze_include": lambda: some("parameters", 2),
        "freeze_exclude": lambda: some("parameters", 2),
        "layers_to_transform": lambda: rng.choice([0, [0], [0, 1], 7]),
        "rank_pattern": lambda: {rng.choice(["wq", "linear_proj", "dense", "mlp.experts.3", "down_proj"]): 5},
        "lora_dropout": lambda: 0.1,
        "lora_init": lambda: rng.choice(_INITIALIZERS),
        "param_init_type": lambda: "bfloat16",
    }
    for field, value in optional.items():
        if rng.random() < 0.08:
            pet[field] = value()
    if rng.random() < 0.25:
        pet["quantize_base"] = "nf4"
        if rng.random() < 0.5:
            pet["quantize_exclude"] = some("cells", 1)
        if rng.random() < 0.3:
            pet["lora_init"] = "loftq"
    return pet


def pet_configs(model, count, seed=0):
    """Returns ``count`` pet_configs for a model."""
    rng = random.Random(f"{model} {seed}")
    return [pet_config(model, rng) for _ in range(count)]
