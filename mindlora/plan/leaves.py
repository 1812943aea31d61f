"""What the cells of any model are for, under the names of the legacy Llama's cells."""

import functools
from typing import Optional

from mindlora.models import names

# The last part of a path -> that of the Llama's cell with the same place in a layer.
_ROLES = {
    "query_key_value": "w_qkv",
    "dense": "wo",
    "dense_h_to_4h": "w_gate_hidden",
    "dense_left": "w1",
    "dense_right": "w3",
    "dense_4h_to_h": "w2",
    "output_layer": "lm_head",
    "embedding": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
    "final_layernorm": "norm_out",
}
_FURTHER = "mtp."


@functools.lru_cache(maxsize=None)
def leaf_of(path: str) -> str:
    """Returns the last part of a cell's path, as the legacy Llama calls it."""
    leaf = names.to_mindformers(path).rpartition(".")[2]
    return _ROLES.get(leaf, leaf)


def layer_of(path: str) -> Optional[int]:
    """Returns the layer of a path, or None; layers that predict further tokens are none, and follow the last one."""
    return None if path.startswith(_FURTHER) else names.layer_of(path)
