"""Qwen3, which MindFormers has as an mcore model alone. Its cells are the Llama's, with norms on q and k."""

import dataclasses
from typing import Any, Dict

from mindlora.models.architectures.architecture import Names
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
