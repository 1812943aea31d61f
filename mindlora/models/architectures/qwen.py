"""Qwen3, Qwen3-MoE and Qwen2 as mcore models. Their cells are the Llama's; those of Qwen3 have norms on q and k."""

import dataclasses
from typing import Any, Dict

from mindlora.models.architectures.architecture import Experts, Names
from mindlora.models.architectures.hugging_face import HuggingFaceConfig
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.architectures.mcore_sizes import GroupedSizes

# Defaults of MindFormers' Qwen3Config.
DEFAULTS = {
    "layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128, "hidden": 4096, "inner": 22016, "vocab": 151936
}  # fmt: skip
HEAD_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")
# The state of dropouts, which MindFormers 1.8 keeps as parameters.
DROPOUT_STATE = ("dropout.seed", "dropout.offset")
_SIZES = GroupedSizes(DEFAULTS, head_norms=HEAD_NORMS)


def from_hugging_face(config: HuggingFaceConfig) -> Dict[str, Any]:
    """Returns the model_config of MindFormers' Qwen3ForCausalLM; as Architecture.from_hugging_face."""
    config.require("hidden_act", "silu", "MindFormers' Qwen3 has silu alone")
    config.require("attention_bias", False, "MindFormers' Qwen3 has no bias on its output projections")
    rope = config.rope()
    if rope.kind != "default":
        config.refuse(config.rope_key, "MindFormers does not scale the rotary embedding of Qwen3 and would ignore it")
    heads = config.count("num_attention_heads")
    return {
        "model_type": "qwen3",
        "architectures": "Qwen3ForCausalLM",
        "vocab_size": config.count("vocab_size"),
        "hidden_size": config.count("hidden_size"),
        "intermediate_size": config.count("intermediate_size"),
        "num_hidden_layers": config.count("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.count("num_key_value_heads", heads),
        "head_dim": config.count("head_dim", DEFAULTS["head_dim"]),
        "hidden_act": "silu",
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": rope.theta,
        "max_position_embeddings": config.count("max_position_embeddings", 32768),
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
        "position_embedding_type": "rope",
        "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }


QWEN3 = dataclasses.replace(
    LLAMA,
    title="Qwen3",
    model_types=("Qwen3ForCausalLM", "Qwen3Config"),
    parameters=(
        *LLAMA.parameters,
        Names("self_attn.q_norm.weight", "", "self_attention.q_layernorm.weight"),
        Names("self_attn.k_norm.weight", "", "self_attention.k_layernorm.weight"),
    ),
    computed=(*LLAMA.computed, *DROPOUT_STATE),
    linear_sizes=_SIZES.linear,
    parameter_sizes=_SIZES.parameters,
    hugging_face_types=("qwen3",),
    from_hugging_face=from_hugging_face,
    hub_names=r"qwen3-(?!next|vl|omni|asr)[a-z-]*[\d.]+b(?!-a[\d.]+b)",
    legacy=False,
    served=True,
)


# Qwen3-MoE: Qwen3 with routed experts in every layer


# Defaults of MindFormers' Qwen3MoeConfig.
_MOE_DEFAULTS = {
    "layers": 24, "heads": 32, "kv_heads": 4, "hidden": 2048, "vocab": 151936, "experts": 128, "expert_inner": 768
}  # fmt: skip
EXPERTS = (
    Experts(Names("mlp.experts.gate_up_proj", "mlp.experts.weight1", "mlp.experts.weight1"), ("gate_proj", "up_proj")),
    Experts(Names("mlp.experts.down_proj", "mlp.experts.weight2", "mlp.experts.weight2"), ("down_proj",)),
)
ROUTER = Names("mlp.gate", "mlp.router", "mlp.router")
# The experts are chosen by a softmax over all of them, as in transformers' models.
EXPERTS_BY_SOFTMAX = {
    "moe_grouped_gemm": True,
    "moe_router_pre_softmax": True,
    "routed_scaling_factor": 1.0,
    "router_dense_type": "float32",
    "moe_aux_loss_coeff": 0.0,
}
# A router's counts in training.
COUNTS = ("mlp.router.expert_load", "mlp.router.fi_accu", "mlp.tokens_per_expert")
_MOE_SIZES = GroupedSizes(_MOE_DEFAULTS, head_norms=HEAD_NORMS, has_experts=True)


def from_hugging_face_moe(config: HuggingFaceConfig) -> Dict[str, Any]:
    """Returns the model_config of MindFormers' Qwen3MoeForCausalLM; as Architecture.from_hugging_face."""
    config.require("decoder_sparse_step", 1, "every layer of MindFormers' Qwen3-MoE has experts")
    config.require("mlp_only_layers", [], "every layer of MindFormers' Qwen3-MoE has experts")
    return {
        **from_hugging_face(config),
        "model_type": "qwen3_moe",
        "architectures": "Qwen3MoeForCausalLM",
        # transformers 5 calls it num_local_experts.
        "num_experts": config.count("num_experts", config.get("num_local_experts")),
        "num_experts_per_tok": config.count("num_experts_per_tok"),
        "moe_intermediate_size": config.count("moe_intermediate_size"),
        "norm_topk_prob": config.flag("norm_topk_prob"),
        **EXPERTS_BY_SOFTMAX,
    }


QWEN3_MOE = dataclasses.replace(
    QWEN3,
    title="Qwen3-MoE",
    model_types=("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    parameters=(*QWEN3.parameters, Names("mlp.gate.weight", "", "mlp.router.weight")),
    computed=(*QWEN3.computed, *COUNTS),
    linear_sizes=_MOE_SIZES.linear,
    parameter_sizes=_MOE_SIZES.parameters,
    hugging_face_types=("qwen3_moe",),
    from_hugging_face=from_hugging_face_moe,
    hub_names=r"qwen3-(?!next|vl|omni|asr)[a-z-]*[\d.]+b-a[\d.]+b",
    experts=EXPERTS,
    router=ROUTER,
    served=True,
)


# Qwen2, which MindFormers has as an mcore model for prediction alone
#
# Its legacy Qwen2 is LlamaForCausalLM with qkv_has_bias: True, so llama.py describes it: the biases of q, k and v are
# wq.bias, wk.bias and wv.bias (or w_qkv.bias).


# Defaults of MindFormers' Qwen2Config, which has no head_dim.
_QWEN2_SIZES = GroupedSizes({**DEFAULTS, "head_dim": None}, norm_dtype="layernorm_compute_dtype")

QWEN2 = dataclasses.replace(
    LLAMA,
    title="Qwen2 (mcore)",
    model_types=("Qwen2ForCausalLM", "Qwen2Config"),
    linear_sizes=_QWEN2_SIZES.linear,
    parameter_sizes=_QWEN2_SIZES.parameters,
    hugging_face_types=(),
    from_hugging_face=None,
    trains=False,
    instead="Qwen2 trains with use_legacy: True, as LlamaForCausalLM with qkv_has_bias: True.",
    served=True,
)
