"""The widths of a model's attention, from the sizes of its cells."""

from typing import Any, Mapping, NamedTuple, Tuple


class Attention(NamedTuple):
    """Widths of what a layer's attention makes of a token, over all heads.

    Attributes:
        heads (int): Query heads.
        output (int): Width of what the output projection takes.
        cached (int): Elements of a token in the KV cache of a layer.
        latent (bool): Whether k and v come from a latent, which is what the cache holds.
    """

    heads: int
    queries: int
    keys: int
    output: int
    cached: int
    latent: bool


def attention_by_heads(model_config: Mapping[str, Any], cells: Mapping[str, Tuple[int, int]]) -> Attention:
    """Returns the attention of a model whose heads have keys and values of their own, or share them in groups."""
    output = cells["wo"][1]
    keys = cells["wk"][0] if "wk" in cells else (cells["w_qkv"][0] - output) // 2
    heads = int(model_config.get("num_heads") or model_config.get("num_attention_heads") or 32)
    return Attention(heads, output, keys, output, 2 * keys, False)
