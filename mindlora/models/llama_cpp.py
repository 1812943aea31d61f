"""llama.cpp's names, in GGUF files, for the models that it shares with mindlora, and for their tensors."""

import re
from typing import Dict, NamedTuple, Optional

import numpy as np


class LlamaCppModel(NamedTuple):
    """A kind of model in llama.cpp.

    Attributes:
        name (str): general.architecture of its files.
        rotates_neighbors (bool): Whether it rotates neighbors among the elements of a head where Hugging Face's model
            rotates the two halves, so that the rows of q and k stand in another order.
    """

    name: str
    rotates_neighbors: bool = False


# model_type of config.json -> llama.cpp's model.
MODELS: Dict[str, LlamaCppModel] = {
    "llama": LlamaCppModel("llama", rotates_neighbors=True),
    "mistral": LlamaCppModel("llama", rotates_neighbors=True),
    "qwen2": LlamaCppModel("qwen2"),
    "qwen3": LlamaCppModel("qwen3"),
}
_CELLS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTSIDE_LAYERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def cell_name(path: str) -> Optional[str]:
    """Returns llama.cpp's name for the cell at ``path`` (Hugging Face's), such as blk.0.attn_q; None if it has none."""
    match = _IN_LAYER.fullmatch(path)
    if match is None:
        return _OUTSIDE_LAYERS.get(path)
    name = _CELLS.get(match[2])
    return name and f"blk.{match[1]}.{name}"


def is_rotated(path: str) -> bool:
    """Returns whether the rotary embedding turns the output of the cell at ``path`` (Hugging Face's)."""
    return path.endswith(("self_attn.q_proj", "self_attn.k_proj"))


def neighbors_from_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Orders the rows of q or k, [out, ...], so that elements rotated together are neighbours in each head."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
