"""The widths of a model's attention, from the sizes of its cells."""

from typing import Any, Dict, NamedTuple, Tuple

from mindlora.models.deepseek_v3 import DEFAULTS
from mindlora.models.mcore_config import ModelConfig
from mindlora.plan.leaves import leaf_of


class Attention(NamedTuple):
    """Widths of what a layer's attention makes of a token, over all heads.

    Attributes:
        heads (int): Query heads.
        queries (int): Width of q.
        keys (int): Width of k.
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


def attention_of(model: Dict[str, Any], linear: Dict[str, Tuple[int, int]]) -> Attention:
    """Returns the attention of a model's first layer.

    Args:
        model (dict): The node model_config.
        linear (dict): Path -> (out, in) of its linear cells.
    """
    cells = {leaf_of(path): size for path, size in reversed(linear.items())}
    output = cells["wo"][1]
    if "wkv_up" in cells:
        config = ModelConfig(model, DEFAULTS)
        heads, rotary = config["heads"], config["rotary_head"]
        queries = heads * (config["qk_head"] + rotary)
        return Attention(heads, queries, queries, output, cells["wkv_up"][1] + rotary, True)
    keys = cells["wk"][0] if "wk" in cells else (cells["w_qkv"][0] - output) // 2
    heads = int(model.get("num_heads") or model.get("num_attention_heads") or 32)
    return Attention(heads, output, keys, output, 2 * keys, False)
