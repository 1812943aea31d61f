"""Llama. Qwen2 has the same names in every world, plus biases on q, k and v, so this record serves it too."""

from typing import Any, Dict, Optional, Tuple

from mindlora.models.architecture import Architecture, JoinedCell, Names, ParameterSize, dtype_of
from mindlora.models.joined_rows import RowsByKeyValueHead, RowsInTurn


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
    joined=(W_QKV, W_GATE_HIDDEN),
    computed=("rotary_emb.inv_freq",),
    linear_sizes=linear_sizes,
    hugging_face_types=("llama", "qwen2", "mistral"),
    parameter_sizes=parameter_sizes,
)
