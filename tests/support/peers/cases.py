"""Models and adapters that PEFT makes for these tests, as data."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
VOCABULARY = 64
WEIGHTS = "adapter_model.safetensors"

# Weights large enough for scores and logits of about 1, so that a wrong rotation or scale shows.
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Name -> (largest file, keys of transformers' LlamaConfig).
MODELS = {
    "plain": ("1GB", {**_SIZES, "rms_norm_eps": 1e-6}),
    "grouped": (
        "20KB",
        {
            **_SIZES,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "tied": ("1GB", {**_SIZES, "tie_word_embeddings": True}),
}
# model_type of a mixture of experts -> keys of transformers' configuration.
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
EXPERT_MODELS = {
    "qwen3_moe": {
        **_SIZES,
        **_EXPERTS,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_experts": 4,
    },
    "deepseek_v3": {**_SIZES, **_EXPERTS, **_LATENT, **_GROUPS},
}
EXPERT_WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _case(model, dtype="float32", safetensors=True, embeddings="auto", **config):
    """One adapter: its model, the keys of PEFT's LoraConfig, and how it is saved."""
    return {
        "model": model,
        "dtype": dtype,
        "safetensors": safetensors,
        "embeddings": embeddings,
        "kind": "LoraConfig",
        "config": {"r": 4, "lora_alpha": 6, "lora_dropout": 0.1, **config},
    }


def _vera(model, **config):
    return {**_case(model), "kind": "VeraConfig", "config": {"r": 6, "vera_dropout": 0.1, "d_initial": 0.5, **config}}


def _miss(model, dtype="float32", **config):
    return {**_case(model, dtype), "kind": "MissConfig", "config": {"r": 6, "miss_dropout": 0.1, **config}}


ADAPTERS = {
    "attention": _case("plain", target_modules=ATTENTION),
    "all-linear": _case("plain", target_modules="all-linear"),
    "rslora": _case("plain", target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True),
    "patterns": _case(
        "plain",
        target_modules=["q_proj", "v_proj", "up_proj"],
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        alpha_pattern={"v_proj": 3, r"model\.layers\.0\.self_attn\.q_proj": 16},
    ),
    "patterns-rslora": _case(
        "plain",
        target_modules=["q_proj", "v_proj"],
        use_rslora=True,
        rank_pattern={"v_proj": 9},
        alpha_pattern={r"0\.self_attn\.q_proj": 2.5},
    ),
    "grouped": _case("grouped", target_modules=[*ATTENTION, "gate_proj"]),
    "tied": _case("tied", target_modules="all-linear"),
    "regex": _case("plain", target_modules=r".*\.1\.(self_attn\.[kv]_proj|mlp\.gate_proj)"),
    "layers": _case("grouped", target_modules=ATTENTION, layers_to_transform=[1]),
    "one-layer": _case("grouped", target_modules=["o_proj", "up_proj"], layers_to_transform=0, layers_pattern="layers"),
    "exclude": _case("plain", target_modules="all-linear", exclude_modules=["o_proj", "layers.0.mlp.up_proj"]),
    "whole": _case("plain", target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head", "input_layernorm"]),
    "whole-norms": _case("grouped", target_modules=["v_proj"], modules_to_save=["norm"]),
    "whole-embedding": _case("plain", target_modules=["v_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "bfloat16": _case("plain", "bfloat16", target_modules=ATTENTION),
    "bfloat16-whole": _case("plain", "bfloat16", target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "float16": _case("grouped", "float16", target_modules=ATTENTION),
    # PEFT also saves the base's own weight of an adapted output head. If it is told to, or if the vocabulary grew, it
    # also saves those of the embedding and the head, without mentioning them in the configuration.
    "lm_head": _case("plain", target_modules=["q_proj", "lm_head"]),
    "embeddings": _case("plain", embeddings=True, target_modules=["q_proj"]),
    "dora": _case("plain", target_modules=["q_proj", "v_proj", "down_proj"], use_dora=True),
    "dora-grouped": _case(
        "grouped", target_modules="all-linear", use_dora=True, use_rslora=True, rank_pattern={"v_proj": 3}
    ),
    "dora-bfloat16": _case("plain", "bfloat16", target_modules=["k_proj", "up_proj"], use_dora=True),
    "embedding": _case("plain", target_modules=["embed_tokens", "q_proj"]),
    "embedding-alone": _case("grouped", embeddings=False, target_modules=["embed_tokens"], use_rslora=True),
    # Cells of several sizes, so that most use a part of A and B.
    "vera": _vera("plain", target_modules=["q_proj", "v_proj", "down_proj"], projection_prng_key=7),
    "vera-grouped": _vera(
        "grouped", target_modules=[*ATTENTION, "up_proj"], layers_to_transform=[1], modules_to_save=["norm"]
    ),
    # 6 divides 48, the inputs of down_proj, and not 32, those of the others.
    "miss": _miss("plain", target_modules=["q_proj", "v_proj", "down_proj"]),
    "miss-grouped": _miss("grouped", target_modules="all-linear", r=8, modules_to_save=["norm"]),
    "miss-bfloat16": _miss("plain", "bfloat16", target_modules="all-linear", exclude_modules=["o_proj"]),
    "bin": _case("plain", safetensors=False, target_modules=["q_proj", "o_proj"]),
    "combine-1": _case("plain", target_modules=["q_proj", "k_proj", "v_proj"]),
    "combine-2": _case("plain", target_modules=["q_proj", "v_proj", "down_proj"], lora_alpha=10),
    "combine-3": _case("plain", target_modules=["q_proj", "v_proj"], r=6, lora_alpha=3),
}
