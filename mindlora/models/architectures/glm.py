"""The GLM family: ChatGLM2 and ChatGLM3, legacy models of MindFormers, and GLM4."""

import dataclasses
from typing import Any, Dict, Tuple

from mindlora.models.architectures.architecture import Architecture, JoinedCell, Names, ParameterSize, Rotary, dtype_of
from mindlora.models.architectures.hugging_face import HuggingFaceConfig
from mindlora.models.architectures.joined_rows import PartAfterPart, QueryKeyValueInTurn
from mindlora.models.architectures.llama import ATTENTION, LLAMA, W_QKV
from mindlora.models.architectures.mcore_sizes import GroupedSizes

# ChatGLM2 and ChatGLM3
#
# Unlike the Llama, Hugging Face's model has the joined cells too, with their parts one after the other. MindFormers
# uses them by default; qkv_concat: False and mlp_concat: False split them.

_FROM_HIDDEN = ("query_key_value", "wq", "wk", "wv")


def glm2_linear_sizes(model_config: dict) -> Dict[str, Tuple[int, int]]:
    """Returns path -> (out, in) of the linear cells that ChatGLM2ForConditionalGeneration has with this config."""

    def get(key: str, default: Any) -> Any:
        return model_config.get(key, default)

    hidden = get("hidden_size", 4096)
    inner = get("ffn_hidden_size", 13696)
    query = get("kv_channels", 128) * get("num_attention_heads", 32)
    key_value = get("kv_channels", 128) * get("multi_query_group_num", 2)
    key_value = key_value if get("multi_query_attention", True) else query
    cells = {
        "self_attention.query_key_value": (query + 2 * key_value, hidden),
        "self_attention.wq": (query, hidden),
        "self_attention.wk": (key_value, hidden),
        "self_attention.wv": (key_value, hidden),
        "self_attention.dense": (hidden, query),
        "mlp.dense_h_to_4h": (2 * inner, hidden),
        "mlp.dense_left": (inner, hidden),
        "mlp.dense_right": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
    }
    absent = ["wq", "wk", "wv"] if get("qkv_concat", True) else ["query_key_value"]
    absent += ["dense_left", "dense_right"] if get("mlp_concat", True) else ["dense_h_to_4h"]
    present = {end: size for end, size in cells.items() if end.rpartition(".")[2] not in absent}
    sizes = {
        f"transformer.encoder.layers.{layer}.{end}": size
        for layer in range(get("num_layers", 28))
        for end, size in present.items()
    }
    return {**sizes, "transformer.output_layer": (get("padded_vocab_size", 65024), hidden)}


def glm2_parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of all parameters of ChatGLM2ForConditionalGeneration except its KV cache."""
    linear = glm2_linear_sizes(model_config)
    every = bool(model_config.get("add_bias_linear"))
    weight = dtype_of(model_config, "param_init_type", "float16")
    norm = dtype_of(model_config, "layernorm_compute_type", "float32")
    table = linear["transformer.output_layer"]
    parts = ("weight",) if model_config.get("rmsnorm", True) else ("gamma", "beta")
    sizes = {"transformer.embedding.embedding_weight": ParameterSize(table, weight)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += [name for name in ("post_self_attn_layernorm", "post_mlp_layernorm") if model_config.get(name)]
    for path, (rows, columns) in linear.items():
        parent, _, leaf = path.rpartition(".")
        sizes[f"{path}.weight"] = ParameterSize((rows, columns), weight)
        has_bias = every or leaf in _FROM_HIDDEN and model_config.get("add_qkv_bias", True)
        if has_bias and leaf != "output_layer":
            sizes[f"{path}.bias"] = ParameterSize((rows,), weight)
        if leaf == "dense":
            layer = parent.rpartition(".")[0]
            sizes |= {f"{layer}.{name}.{part}": ParameterSize(table[1:], norm) for name in norms for part in parts}
    if model_config.get("post_layer_norm", True):
        sizes |= {f"transformer.encoder.final_layernorm.{part}": ParameterSize(table[1:], norm) for part in parts}
    return sizes


def _same(name: str) -> Names:
    return Names(name, name)


GLM2 = Architecture(
    title="ChatGLM2 and ChatGLM3",
    model_types=("ChatGLM2ForConditionalGeneration", "ChatGLM2Config"),
    cells=(
        _same("self_attention.query_key_value"),
        Names("", "self_attention.wq"),
        Names("", "self_attention.wk"),
        Names("", "self_attention.wv"),
        _same("self_attention.dense"),
        _same("mlp.dense_h_to_4h"),
        Names("", "mlp.dense_left"),
        Names("", "mlp.dense_right"),
        _same("mlp.dense_4h_to_h"),
    ),
    parameters=(
        _same("input_layernorm.weight"),
        _same("post_attention_layernorm.weight"),
        _same("transformer.encoder.final_layernorm.weight"),
    ),
    embedding=Names("transformer.embedding.word_embeddings", "transformer.embedding"),
    embedding_weight=Names("weight", "embedding_weight"),
    output_head=_same("transformer.output_layer"),
    joined=(
        JoinedCell("query_key_value", ("wq", "wk", "wv"), QueryKeyValueInTurn()),
        JoinedCell("dense_h_to_4h", ("dense_left", "dense_right"), PartAfterPart()),
    ),
    computed=("rotary_pos_emb.inv_freq",),
    linear_sizes=glm2_linear_sizes,
    parameter_sizes=glm2_parameter_sizes,
    hugging_face_types=("chatglm",),
    hub_names=r"chatglm[23]-",
    layers=Names("transformer.encoder.layers", "transformer.encoder.layers"),
    roles={
        "query_key_value": "w_qkv",
        "dense": "wo",
        "dense_h_to_4h": "w_gate_hidden",
        "dense_left": "w1",
        "dense_right": "w3",
        "dense_4h_to_h": "w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    },
    cache_blocks=128,
    caches_in_training=True,
    takes_shifted_labels=True,
)


# GLM4 (GLM-4-0414), which MindFormers has as an mcore model for prediction alone
#
# Hugging Face joins gate and up too, one after the other, so the cell is the same everywhere.


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
