"""DeepSeek-V3, which MindFormers has as an mcore model alone: latent attention, dense and expert layers.

With mla_qkv_concat, the default, MindFormers joins the projections from the hidden state to the latents of q and of
k and v, and calls the others linear_qb and linear_kvb. Without it, the cells are Hugging Face's.
"""

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Tuple

from mindlora.models.architectures.architecture import Attention, JoinedCell, Names, ParameterSize, dtype_of
from mindlora.models.architectures.hugging_face import HuggingFaceConfig
from mindlora.models.architectures.joined_rows import UnequalPartAfterPart
from mindlora.models.architectures.llama import FEED_FORWARD, LLAMA, W_GATE_HIDDEN
from mindlora.models.architectures.llama import NORMS as LLAMA_NORMS
from mindlora.models.architectures.mcore_sizes import (
    ModelConfig,
    Sizes,
    expert_sizes,
    feed_forward_sizes,
    in_layers,
    layers_of,
    parameter_sizes_of,
)
from mindlora.models.architectures.qwen import COUNTS, DROPOUT_STATE, EXPERTS, ROUTER

# Defaults of MindFormers' DeepseekV3Config.
DEFAULTS = {
    "layers": 61, "heads": 128, "hidden": 7168, "inner": 18432, "vocab": 129280, "q_rank": 1536, "kv_rank": 512,
    "qk_head": 128, "rotary_head": 64, "v_head": 128, "expert_inner": 2048, "experts": 256, "shared_experts": 1,
    "dense_layers": 3, "expert_layers": 1, "mla_joined": True, "further_layers": 1,
}  # fmt: skip
SHARED_EXPERTS = (
    Names("mlp.shared_experts.gate_proj", "mlp.shared_experts.w1", "mlp.shared_experts.gating"),
    Names("mlp.shared_experts.down_proj", "mlp.shared_experts.w2", "mlp.shared_experts.linear_fc2"),
    Names("mlp.shared_experts.up_proj", "mlp.shared_experts.w3", "mlp.shared_experts.hidden"),
)
Q_DOWN = Names("self_attn.q_a_proj", "attention.wq_down", "self_attention.linear_q_down_proj")
KV_DOWN = Names("self_attn.kv_a_proj_with_mqa", "attention.wkv_down", "self_attention.linear_kv_down_proj")
# For a model without latents of q.
Q = Names("self_attn.q_proj", "attention.wq", "self_attention.linear_q_proj")
OUT = Names("self_attn.o_proj", "attention.wo", "self_attention.linear_proj")
W_QKV_DOWN = JoinedCell("w_qkv_down", ("wq_down", "wkv_down"), UnequalPartAfterPart(), "linear_qkv")


def linear_sizes(model_config: dict) -> Sizes:
    """Returns path -> (out, in) of the linear cells of MindFormers' DeepseekV3ForCausalLM, without routed experts."""
    config = ModelConfig(model_config, DEFAULTS)
    dense = feed_forward_sizes("mlp", config["inner"], config)
    shared = config["shared_experts"] and (config["shared_inner"] or config["shared_experts"] * config["expert_inner"])
    expert = feed_forward_sizes("mlp.shared_experts", shared, config) if shared else {}
    attention = _attention_sizes(config)
    layers = [{**attention, **(expert if routed else dense)} for routed in _routed_layers(config)]
    sizes = in_layers(layers, config)
    for number in range(config["further_layers"] or 0):
        # The module that predicts the token after the next: a layer like the last, for two hidden states side by side.
        sizes[f"mtp.layers.{number}.eh_proj"] = (config["hidden"], 2 * config["hidden"])
        sizes |= {f"mtp.layers.{number}.transformer_layer.{end}": size for end, size in layers[-1].items()}
    return sizes


def parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of all parameters of MindFormers' DeepseekV3ForCausalLM except routers' counts."""
    config = ModelConfig(model_config, DEFAULTS)
    linear = linear_sizes(model_config)
    dtype = dtype_of(model_config, "params_dtype")
    sizes = parameter_sizes_of(model_config, linear, _norm_sizes(model_config, config), ties=False)
    routed = _routed_layers(config)
    further = config["further_layers"] or 0
    for layer, has_experts in zip(layers_of(linear), [*routed, *routed[-1:] * further]):
        if has_experts:
            sizes |= expert_sizes(f"{layer}.mlp", config, dtype)
            if model_config.get("moe_router_enable_expert_bias") is not False:
                sizes[f"{layer}.mlp.router.expert_bias"] = ParameterSize((config["experts"],), "float32")
            if model_config.get("use_shared_expert_gating") and config["shared_experts"]:
                gate = f"{layer}.mlp.shared_experts.shared_experts_gate.weight"
                sizes[gate] = ParameterSize((1, config["hidden"]), dtype)
    for number in range(further):
        norms = [f"mtp.layers.{number}.{norm}.weight" for norm in ("enorm", "hnorm", "final_layernorm")]
        sizes |= dict.fromkeys(norms, ParameterSize((config["hidden"],), dtype))
    return sizes


def attention(model_config: Mapping[str, Any], cells: Mapping[str, Tuple[int, int]]) -> Attention:
    """Returns the widths of latent attention; as Architecture.attention."""
    config = ModelConfig(dict(model_config), DEFAULTS)
    queries = config["heads"] * (config["qk_head"] + config["rotary_head"])
    cached = cells["wkv_up"][1] + config["rotary_head"]
    return Attention(config["heads"], queries, queries, cells["wo"][1], cached, True)


def unsupported(model_config: dict) -> Optional[str]:
    """Returns why linear_qkv of a model without latents of q takes no adapter, or None if it is not such a model."""
    config = ModelConfig(model_config, DEFAULTS)
    if config["q_rank"] is not None or config["mla_joined"] is False:
        return None
    return (
        "q_lora_rank is null and mla_qkv_concat is True: linear_qkv then joins q_proj and kv_a_proj_with_mqa, and "
        "mindlora knows the cell only with the latent of q in it. Set model_config.mla_qkv_concat: False."
    )


def _norm_sizes(model_config: dict, config: ModelConfig) -> Dict[str, int]:
    """Returns end of a path -> size of the norms in a layer; qk_layernorm adds the norms of the latents."""
    norms = {"input_layernorm": config["hidden"], "pre_mlp_layernorm": config["hidden"]}
    if model_config.get("qk_layernorm"):
        norms[f"self_attention.{'k' if config['mla_joined'] else 'kv'}_layernorm"] = config["kv_rank"]
        norms |= {"self_attention.q_layernorm": config["q_rank"]} if config["q_rank"] else {}
    return norms


def _attention_sizes(config: ModelConfig) -> Sizes:
    hidden = config["hidden"]
    heads = config["heads"]
    q_rank = config["q_rank"]
    query = heads * (config["qk_head"] + config["rotary_head"])
    up = (heads * (config["qk_head"] + config["v_head"]), config["kv_rank"])
    down = config["kv_rank"] + config["rotary_head"]
    if config["mla_joined"]:
        cells = {"linear_qkv": ((q_rank or query) + down, hidden), "linear_kvb": up}
        cells.update({"linear_qb": (query, q_rank)} if q_rank else {})
    else:
        cells = {"linear_kv_down_proj": (down, hidden), "linear_kv_up_proj": up}
        q = {"linear_q_down_proj": (q_rank, hidden), "linear_q_up_proj": (query, q_rank)}
        cells.update(q if q_rank else {"linear_q_proj": (query, hidden)})
    cells["linear_proj"] = (hidden, heads * config["v_head"])
    return {f"self_attention.{cell}": size for cell, size in cells.items()}


def _routed_layers(config: ModelConfig) -> List[Any]:
    """Returns for each layer whether it has experts."""
    layers = config["layers"]
    dense = config["dense_layers"]
    every = config["expert_layers"]
    if not config["experts"]:
        return [False] * layers
    if dense:
        return [number >= dense for number in range(layers)]
    return list(every) if isinstance(every, list) else [number % every == 0 for number in range(layers)]


def from_hugging_face(config: HuggingFaceConfig) -> Dict[str, Any]:
    """Returns the model_config of MindFormers' DeepseekV3ForCausalLM; as Architecture.from_hugging_face."""
    config.require("hidden_act", "silu", "MindFormers' DeepSeek-V3 has silu alone")
    config.require("attention_bias", False, "MindFormers' DeepSeek-V3 has no bias on its attention")
    config.require("tie_word_embeddings", False, "the output head of MindFormers' DeepSeek-V3 is its own")
    config.require("moe_layer_freq", 1, "after its dense layers, every layer of transformers' DeepSeek-V3 has experts")
    config.require("scoring_func", "sigmoid", "the router of DeepSeek-V3 has sigmoid alone")
    config.require("topk_method", "noaux_tc", "the router of DeepSeek-V3 chooses by groups, with a bias")
    config.require("rope_interleave", True, "MindFormers' DeepSeek-V3 turns neighbours by one angle")
    counts = (
        *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "n_shared_experts", "n_routed_experts", "num_experts_per_tok", "n_group"),
        *("topk_group", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim"),
    )
    # null is a model without a latent of q, whose cells MindFormers must not join.
    q_rank = config.count("q_lora_rank") if config.get("q_lora_rank") else None
    return {
        "model_type": "deepseek_v3",
        "architectures": "DeepseekV3ForCausalLM",
        **{key: config.count(key) for key in counts},
        "num_key_value_heads": config.count("num_key_value_heads", config.count("num_attention_heads")),
        "q_lora_rank": q_rank,
        "mla_qkv_concat": q_rank is not None,
        "qk_layernorm": True,
        "first_k_dense_replace": config.get("first_k_dense_replace", 3),
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "routed_scaling_factor": config.number("routed_scaling_factor", 2.5),
        "moe_grouped_gemm": True,
        "moe_router_enable_expert_bias": True,
        "router_dense_type": "float32",
        "moe_aux_loss_coeff": 0.0,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        **_rotary_keys(config),
    }


def _rotary_keys(config: HuggingFaceConfig) -> Dict[str, Any]:
    rope = config.rope()
    positions = config.count("max_position_embeddings", 4096)
    if rope.kind == "default":
        # Without a factor, MindFormers scales its softmax by the published model's. It ignores scaling_factor.
        keys: Dict[str, Any] = {"position_embedding_type": "rope", "rotary_scaling_factor": 1.0}
        return {"rope_theta": rope.theta, "max_position_embeddings": positions, **keys}
    if rope.kind != "yarn":
        config.refuse(config.rope_key, f"MindFormers' DeepSeek-V3 has no rotary embedding of rope_type {rope.kind}")
    defaults = {
        "factor": None,
        "original_max_position_embeddings": None,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": None,
        "mscale_all_dim": None,
    }
    settings = config.scaling(rope, defaults)
    if settings["mscale"] != settings["mscale_all_dim"]:
        config.refuse(config.rope_key, "mscale and mscale_all_dim must be one number, as MindFormers takes them for it")
    return {
        "rope_theta": rope.theta,
        "max_position_embeddings": positions,
        "rope_scaling": {"type": "yarn", **settings},
    }


DEEPSEEK_V3 = dataclasses.replace(
    LLAMA,
    title="DeepSeek-V3",
    model_types=("DeepseekV3ForCausalLM", "DeepseekV3Config"),
    cells=(
        Q_DOWN,
        Names("self_attn.q_b_proj", "attention.wq_up", "self_attention.linear_qb"),
        KV_DOWN,
        Names("self_attn.kv_b_proj", "attention.wkv_up", "self_attention.linear_kvb"),
        Q,
        OUT,
        *FEED_FORWARD,
        *SHARED_EXPERTS,
    ),
    parameters=(
        *LLAMA_NORMS,
        Names("self_attn.q_a_layernorm.weight", "", "self_attention.q_layernorm.weight"),
        Names("self_attn.kv_a_layernorm.weight", "", "self_attention.k_layernorm.weight"),
        Names("mlp.gate.weight", "", "mlp.router.weight"),
        Names("mlp.gate.e_score_correction_bias", "", "mlp.router.expert_bias"),
    ),
    joined=(W_QKV_DOWN, W_GATE_HIDDEN),
    computed=(*LLAMA.computed, *DROPOUT_STATE, *COUNTS),
    linear_sizes=linear_sizes,
    parameter_sizes=parameter_sizes,
    hugging_face_types=("deepseek_v3",),
    from_hugging_face=from_hugging_face,
    hub_names=r"deepseek-(v3|r1)(?!.*distill)",
    experts=EXPERTS,
    router=ROUTER,
    expert_bias=True,
    attention=attention,
    unsupported=unsupported,
    legacy=False,
)
_APART = {
    "linear_qb": "linear_q_up_proj", "linear_kvb": "linear_kv_up_proj", "k_layernorm.weight": "kv_layernorm.weight"
}  # fmt: skip


def _apart(name: Names) -> Names:
    holder, _, end = name.mcore.partition(".")
    return name._replace(mcore=f"{holder}.{_APART[end]}") if end in _APART else name


DEEPSEEK_V3_APART = dataclasses.replace(
    DEEPSEEK_V3,
    title="DeepSeek-V3 with mla_qkv_concat: False",
    cells=tuple(map(_apart, DEEPSEEK_V3.cells)),
    parameters=tuple(map(_apart, DEEPSEEK_V3.parameters)),
    joined=(W_GATE_HIDDEN,),
)
