"""Llama. Qwen2 has the same names in every world, plus biases on q, k and v, so this record serves it too."""

from typing import Any, Dict, Optional, Tuple

from mindlora.models.architectures.architecture import Architecture, JoinedCell, Names, ParameterSize, dtype_of
from mindlora.models.architectures.hugging_face import HuggingFaceConfig, Rope
from mindlora.models.architectures.joined_rows import RowsByKeyValueHead, RowsInTurn


def linear_sizes(model_config: dict) -> Dict[str, Tuple[int, int]]:
    """Returns path -> (out, in) of the linear cells that MindFormers' LlamaForCausalLM has under ``model_config``."""

    def get(key: str, default: Any = None) -> Any:
        value = model_config.get(key)
        return default if value is None else value

    hidden = get("hidden_size", 4096)
    heads = get("num_heads", 32)
    key_value = get("n_kv_heads", heads) * (hidden // heads)
    inner = get("intermediate_size") or _inner_size(hidden, get("multiple_of", 256), get("ffn_dim_multiplier"))
    if get("qkv_concat", False):
        cells = {
            "attention.w_qkv": (hidden + 2 * key_value, hidden),
            "attention.wo": (hidden, hidden),
            "feed_forward.w_gate_hidden": (2 * inner, hidden),
            "feed_forward.w2": (hidden, inner),
        }
    else:
        cells = {
            "attention.wq": (hidden, hidden),
            "attention.wk": (key_value, hidden),
            "attention.wv": (key_value, hidden),
            "attention.wo": (hidden, hidden),
            "feed_forward.w1": (inner, hidden),
            "feed_forward.w2": (hidden, inner),
            "feed_forward.w3": (inner, hidden),
        }
    sizes = {
        f"model.layers.{layer}.{cell}": size for layer in range(get("num_layers", 32)) for cell, size in cells.items()
    }
    return {**sizes, "lm_head": (get("vocab_size", 32000), hidden)}


def parameter_sizes(model_config: dict) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of all parameters of MindFormers' LlamaForCausalLM under ``model_config``."""
    linear = linear_sizes(model_config)
    hidden = model_config.get("hidden_size") or 4096
    weight = dtype_of(model_config, "param_init_type", "float16")
    norm = dtype_of(model_config, "layernorm_compute_type", "float32")
    biased = ["wq", "wk", "wv", "w_qkv"] if model_config.get("qkv_has_bias") else []
    biased += ["wo"] if model_config.get("attn_proj_has_bias") else []
    table = ParameterSize((linear["lm_head"][0], hidden), dtype_of(model_config, "embedding_init_type", weight))
    sizes = {"model.tok_embeddings.embedding_weight": table}
    for path, (rows, columns) in linear.items():
        parent, _, leaf = path.rpartition(".")
        if leaf in ("wq", "w_qkv"):
            layer = parent.rpartition(".")[0]
            sizes |= {
                f"{layer}.{cell}.weight": ParameterSize((hidden,), norm) for cell in ("attention_norm", "ffn_norm")
            }
        if leaf == "lm_head":
            sizes["model.norm_out.weight"] = ParameterSize((hidden,), norm)
        if leaf != "lm_head" or not model_config.get("tie_word_embeddings"):
            sizes[f"{path}.weight"] = ParameterSize((rows, columns), weight)
        if leaf in biased:
            sizes[f"{path}.bias"] = ParameterSize((rows,), weight)
    return sizes


def _inner_size(hidden: int, multiple_of: int, multiplier: Optional[float]) -> int:
    inner = 4 * hidden
    if multiplier is not None:
        inner = int((multiplier + 0.01) * inner)  # MindFormers adds the 0.01.
    return multiple_of * -(-int(2 * inner / 3) // multiple_of)


def from_hugging_face(config: HuggingFaceConfig) -> Dict[str, Any]:
    """Returns the model_config of MindFormers' LlamaForCausalLM; as Architecture.from_hugging_face."""
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    if config.count("head_dim", hidden // heads) * heads != hidden:
        config.refuse(
            "head_dim",
            f"the heads of MindFormers' Llama have hidden_size / num_attention_heads, {hidden // heads} elements here",
        )
    config.require("hidden_act", "silu", "MindFormers' Llama has silu alone")
    config.require("mlp_bias", False, "the feed-forward cells of MindFormers' Llama have no bias")
    config.require("attention_dropout", 0.0, "MindFormers' Llama has no dropout")
    is_qwen2 = config.model_type == "qwen2"
    # Every Qwen2 has biases on q, k and v; in a Llama, attention_bias means the output projection too.
    has_bias = config.flag("attention_bias")
    positions = config.count("max_position_embeddings", 2048)
    return {
        "type": "LlamaConfig",
        "hidden_size": hidden,
        "num_layers": config.count("num_hidden_layers"),
        "num_heads": heads,
        "n_kv_heads": config.count("num_key_value_heads", heads),
        "vocab_size": config.count("vocab_size"),
        "intermediate_size": config.count("intermediate_size"),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "qkv_has_bias": is_qwen2 or has_bias,
        "attn_proj_has_bias": has_bias and not is_qwen2,
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
        "max_position_embedding": positions,
        **_rotary_keys(config, config.rope(), positions),
    }


def _rotary_keys(config: HuggingFaceConfig, rope: Rope, positions: int) -> Dict[str, Any]:
    """Returns the keys of MindFormers' rotary embedding."""
    if rope.kind == "default":
        return {"theta": rope.theta}
    if rope.kind == "linear":
        # MindFormers' "linear" refuses every factor; PI divides the positions by it, which is the same.
        factor = config.scaling(rope, {"factor": None})["factor"]
        return {"theta": rope.theta, "extend_method": "PI", "scaling_factor": float(factor)}
    if rope.kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        settings = config.scaling(rope, dict.fromkeys(keys))
        if settings["original_max_position_embeddings"] >= positions:
            config.refuse(
                config.rope_key, f"MindFormers scales to more positions than before, but there are {positions}"
            )
        return {
            "theta": rope.theta,
            "extend_method": "LLAMA3",
            "scaling_factor": {**settings, "factor": float(settings["factor"])},
        }
    if rope.kind == "yarn":
        return {"theta": rope.theta, "extend_method": "YARN", "scaling_factor": _yarn_settings(config, rope, positions)}
    config.refuse(config.rope_key, f"MindFormers' Llama has no rotary embedding of rope_type {rope.kind}")


def _yarn_settings(config: HuggingFaceConfig, rope: Rope, positions: int) -> Dict[str, Any]:
    defaults = {
        "factor": None,
        "original_max_position_embeddings": positions,
        "beta_fast": 32,
        "beta_slow": 1,
        # With these, MindFormers multiplies cosine and sine by 0.1 ln(factor) + 1, as transformers does without them.
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    settings = config.scaling(rope, defaults)
    if ("mscale" in rope.settings) != ("mscale_all_dim" in rope.settings):
        config.refuse(config.rope_key, "it must have both mscale and mscale_all_dim, or neither")
    return settings


ATTENTION = (
    Names("self_attn.q_proj", "attention.wq", "self_attention.linear_q"),
    Names("self_attn.k_proj", "attention.wk", "self_attention.linear_k"),
    Names("self_attn.v_proj", "attention.wv", "self_attention.linear_v"),
    Names("self_attn.o_proj", "attention.wo", "self_attention.linear_proj"),
)
FEED_FORWARD = (
    Names("mlp.gate_proj", "feed_forward.w1", "mlp.gating"),
    Names("mlp.down_proj", "feed_forward.w2", "mlp.linear_fc2"),
    Names("mlp.up_proj", "feed_forward.w3", "mlp.hidden"),
)
NORMS = (
    Names("input_layernorm.weight", "attention_norm.weight", "input_layernorm.weight"),
    Names("post_attention_layernorm.weight", "ffn_norm.weight", "pre_mlp_layernorm.weight"),
    Names("model.norm.weight", "model.norm_out.weight", "decoder.final_layernorm.weight"),
)
EMBEDDING = Names("model.embed_tokens", "model.tok_embeddings", "embedding.word_embeddings")
EMBEDDING_WEIGHT = Names("weight", "embedding_weight", "weight")
OUTPUT_HEAD = Names("lm_head", "lm_head", "output_layer")
# Mixtral's, in a legacy Llama with moe_config.
ROUTER = Names("block_sparse_moe.gate", "feed_forward.router.dense")
W_QKV = JoinedCell("w_qkv", ("wq", "wk", "wv"), RowsByKeyValueHead(), "linear_qkv")
# Unless a model is built with use_interleaved_weight_layout_mlp: False, the rows alternate in mcore too.
W_GATE_HIDDEN = JoinedCell("w_gate_hidden", ("w1", "w3"), RowsInTurn(2), "linear_fc1")

LLAMA = Architecture(
    title="Llama and Qwen2",
    model_types=("LlamaForCausalLM", "LlamaConfig"),
    cells=(*ATTENTION, *FEED_FORWARD),
    parameters=NORMS,
    embedding=EMBEDDING,
    embedding_weight=EMBEDDING_WEIGHT,
    output_head=OUTPUT_HEAD,
    router=ROUTER,
    joined=(W_QKV, W_GATE_HIDDEN),
    computed=("rotary_emb.inv_freq",),
    linear_sizes=linear_sizes,
    hugging_face_types=("llama", "qwen2", "mistral"),
    from_hugging_face=from_hugging_face,
    parameter_sizes=parameter_sizes,
)
