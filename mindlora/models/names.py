"""How Hugging Face and MindFormers name the cells and the parameters of a Llama."""

from typing import List, Optional, Tuple

# (Hugging Face, MindFormers): the part of a path that differs, for the cells that carry adapters.
_PARTS = (
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.k_proj", "attention.wk"),
    ("self_attn.v_proj", "attention.wv"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("embed_tokens", "tok_embeddings"),
)

# (Hugging Face, MindFormers): how the name of any other parameter of a Llama ends.
_PARAMETERS = (
    ("embed_tokens.weight", "tok_embeddings.embedding_weight"),
    ("input_layernorm.weight", "attention_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("model.norm.weight", "model.norm_out.weight"),
    ("lm_head.weight", "lm_head.weight"),
)

# MindFormers' qkv_concat: one cell that stands for several.
JOINED = {"w_qkv": ("wq", "wk", "wv"), "w_gate_hidden": ("w1", "w3")}


def to_hugging_face(path: str) -> str:
    """Returns ``path`` under Hugging Face's names; a path with none of MindFormers' names comes back unchanged."""
    for hugging_face, mindformers in _PARTS:
        if path == mindformers or path.endswith("." + mindformers):
            return path[: -len(mindformers)] + hugging_face
    return path


def to_mindformers(path: str) -> str:
    """Returns ``path`` under MindFormers' names; a path with none of Hugging Face's names comes back unchanged."""
    for hugging_face, mindformers in _PARTS:
        if path == hugging_face or path.endswith("." + hugging_face):
            return path[: -len(hugging_face)] + mindformers
    return path


def parameter_to_hugging_face(name: str) -> Optional[str]:
    """Returns the Hugging Face name of a parameter of a MindFormers Llama, or None for a name that is not known."""
    return _renamed(name, to_hugging_face, 1, 0)


def parameter_to_mindformers(name: str) -> Optional[str]:
    """Returns the MindFormers name of a parameter of a Hugging Face Llama, or None for a name that is not known."""
    return _renamed(name, to_mindformers, 0, 1)


def belongs_to(name: str, module: str) -> bool:
    """Tells whether a parameter is of the module whose path is, or ends in, ``module``, under either world's names."""
    aliases_of_name = {name, parameter_to_hugging_face(name) or name}
    return any(("." + alias.rpartition(".")[0]).endswith("." + module) for alias in aliases_of_name)


def _renamed(name, rename_cell, source, target) -> Optional[str]:
    for pair in _PARAMETERS:
        if name == pair[source] or name.endswith("." + pair[source]):
            return name[: -len(pair[source])] + pair[target]
    path, _, leaf = name.rpartition(".")
    known = any(path == pair[source] or path.endswith("." + pair[source]) for pair in _PARTS)
    return f"{rename_cell(path)}.{leaf}" if known and leaf in ("weight", "bias") else None


def layer_of(path: str) -> Optional[int]:
    """Returns the first number in ``path``, which is its layer, or None."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def aliases(path: str) -> Tuple[str, ...]:
    """Returns every path under which a user may name the cell at ``path``."""
    hugging_face = to_hugging_face(path)
    return (path,) if hugging_face == path else (path, hugging_face)


def joined_parts(path: str) -> List[str]:
    """Returns the paths that a concatenated cell stands for, or [] for any other cell."""
    parent, _, leaf = path.rpartition(".")
    return [f"{parent}.{part}" if parent else part for part in JOINED.get(leaf, ())]
