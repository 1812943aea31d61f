"""The linear cells of MindFormers' Llama and their sizes, from its configuration alone."""

from typing import Dict, Tuple


def linear_sizes(model_config: dict) -> Dict[str, Tuple[int, int]]:
    """Returns path -> (out, in) of the linear cells that MindFormers' LlamaForCausalLM has under ``model_config``."""

    def get(key, default=None):
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


def _inner_size(hidden, multiple_of, multiplier) -> int:
    inner = 4 * hidden
    if multiplier is not None:
        inner = int((multiplier + 0.01) * inner)  # the 0.01 is MindFormers'
    return multiple_of * -(-int(2 * inner / 3) // multiple_of)
