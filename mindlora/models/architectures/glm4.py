"""GLM4 (GLM-4-0414), which MindFormers has as an mcore model for prediction alone.

Hugging Face joins gate and up too, one after the other, so the cell is the same everywhere.
"""

import dataclasses
from typing import Any, Dict

from mindlora.models.architectures.architecture import Names, Rotary
from mindlora.models.architectures.hugging_face import HuggingFaceConfig
from mindlora.models.architectures.llama import ATTENTION, LLAMA, W_QKV
from mindlora.models.architectures.mcore_sizes import GroupedSizes

# Defaults of MindFormers' Glm4Config.
_DEFAULTS = {
    "layers": 40, "heads": 32, "kv_heads": 2, "head_dim": 128, "hidden": 4096, "inner": 13696, "vocab": 151552
}  # fmt: skip
_SIZES = GroupedSizes(
    _DEFAULTS,
    norms=("input_layernorm", "post_self_attn_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    norm_dtype="layernorm_compute_dtype",
    has_bias=True,
)

_OUTPUT_NORMS = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
_NORM_EPS, _FACTOR = 1.5625e-7, 0.5


def from_hugging_face(config: HuggingFaceConfig) -> Dict[str, Any]:
    """Returns the model_config of MindFormers' Glm4ForCausalLM; as Architecture.from_hugging_face."""
    config.require("hidden_act", "silu", "MindFormers' GLM4 has silu alone")
    factor = "partial_rotary_factor"
    rope = config.rope(factor)
    if rope.kind != "default":
        config.refuse(config.rope_key, "MindFormers does not scale the rotary embedding of GLM4 and would ignore it")
    in_rope = config.get(config.rope_key, {}).get(factor)
    return {
        "model_type": "glm4",
        "architectures": "Glm4ForCausalLM",
        "vocab_size": config.count("vocab_size"),
        "hidden_size": config.count("hidden_size"),
        "intermediate_size": config.count("intermediate_size"),
        "num_hidden_layers": config.count("num_hidden_layers"),
        "num_attention_heads": config.count("num_attention_heads"),
        "num_key_value_heads": config.count("num_key_value_heads", _DEFAULTS["kv_heads"]),
        "head_dim": config.count("head_dim", _DEFAULTS["head_dim"]),
        "hidden_act": "silu",
        "rms_norm_eps": config.number("rms_norm_eps", _NORM_EPS),
        "rope_theta": rope.theta,
        factor: in_rope or config.number(factor, _FACTOR),
        "max_position_embeddings": config.count("max_position_embeddings", 131072),
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
        "attention_bias": config.flag("attention_bias"),
        "position_embedding_type": "partial_rope",
    }


GLM4 = dataclasses.replace(
    LLAMA,
    title="GLM4",
    model_types=("Glm4ForCausalLM", "Glm4Config"),
    cells=(
        *ATTENTION,
        Names("mlp.gate_up_proj", "feed_forward.w_gate_up", "mlp.linear_fc1"),
        Names("mlp.down_proj", "feed_forward.w2", "mlp.linear_fc2"),
    ),
    parameters=(*LLAMA.parameters, *(Names(name, "", name) for name in _OUTPUT_NORMS)),
    joined=(W_QKV,),
    linear_sizes=_SIZES.linear,
    parameter_sizes=_SIZES.parameters,
    hugging_face_types=("glm4",),
    from_hugging_face=from_hugging_face,
    hub_names=r"glm-(4|z1)-.*0414",
    legacy=False,
    trains=False,
    served=True,
    rotary=Rotary(_FACTOR, interleaved=True),
    norm_eps=_NORM_EPS,
)
