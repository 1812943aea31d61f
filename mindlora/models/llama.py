"""Llama. Qwen2 has the same names in both worlds, plus biases on q, k and v, so this record serves it too."""

from typing import Any, Dict, Optional, Tuple

from mindlora.models.architecture import Architecture, JoinedCell, Names
from mindlora.models.joined_rows import RowsByKeyValueHead, RowsInTurn


def linear_sizes(model_config: dict) -> Dict[str, Tuple[int, int]]:
    """Returns path -> (out, in) of the linear cells that MindFormers' LlamaForCausalLM has under ``model_config``."""

    def get(key: str, default: Any = None) -> Any:
        value = model_config.get(key)
        return default if value is None else value

    hidden, heads = get("hidden_size", 4096), get("num_heads", 32)
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


def _inner_size(hidden: int, multiple_of: int, multiplier: Optional[float]) -> int:
    inner = 4 * hidden
    if multiplier is not None:
        inner = int((multiplier + 0.01) * inner)  # MindFormers adds the 0.01.
    return multiple_of * -(-int(2 * inner / 3) // multiple_of)


LLAMA = Architecture(
    title="Llama and Qwen2",
    model_types=("LlamaForCausalLM", "LlamaConfig"),
    cells=(
        Names("self_attn.q_proj", "attention.wq"),
        Names("self_attn.k_proj", "attention.wk"),
        Names("self_attn.v_proj", "attention.wv"),
        Names("self_attn.o_proj", "attention.wo"),
        Names("mlp.gate_proj", "feed_forward.w1"),
        Names("mlp.down_proj", "feed_forward.w2"),
        Names("mlp.up_proj", "feed_forward.w3"),
    ),
    parameters=(
        Names("input_layernorm.weight", "attention_norm.weight"),
        Names("post_attention_layernorm.weight", "ffn_norm.weight"),
        Names("model.norm.weight", "model.norm_out.weight"),
    ),
    embedding=Names("model.embed_tokens", "model.tok_embeddings"),
    embedding_weight=Names("weight", "embedding_weight"),
    output_head=Names("lm_head", "lm_head"),
    joined=(
        JoinedCell("w_qkv", ("wq", "wk", "wv"), RowsByKeyValueHead()),
        JoinedCell("w_gate_hidden", ("w1", "w3"), RowsInTurn(2)),
    ),
    computed=("rotary_emb.inv_freq",),
    # By default, the rows of mcore's linear_qkv and linear_fc1 are ordered as those of w_qkv and w_gate_hidden.
    mcore=(
        (r"^decoder\.layers\.", "model.layers."),
        (r"\.self_attention\.linear_qkv$", ".attention.w_qkv"),
        (r"\.self_attention\.linear_q$", ".attention.wq"),
        (r"\.self_attention\.linear_k$", ".attention.wk"),
        (r"\.self_attention\.linear_v$", ".attention.wv"),
        (r"\.self_attention\.linear_proj$", ".attention.wo"),
        (r"\.mlp\.linear_fc1$", ".feed_forward.w_gate_hidden"),
        (r"\.mlp\.gating$", ".feed_forward.w1"),
        (r"\.mlp\.linear_fc2$", ".feed_forward.w2"),
        (r"\.mlp\.hidden$", ".feed_forward.w3"),
        (r"^output_layer$", "lm_head"),
    ),
    linear_sizes=linear_sizes,
)
