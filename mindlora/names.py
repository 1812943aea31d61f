"""How Hugging Face and MindFormers name the linear cells of a Llama."""
from typing import List, Tuple

# (Hugging Face, MindFormers): the part of a path that differs, for linear cells and for what holds them.
_PARTS = (
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.k_proj", "attention.wk"),
    ("self_attn.v_proj", "attention.wv"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"),
)

# MindFormers' qkv_concat: one cell that stands for several.
CONCATENATED = {"w_qkv": ("wq", "wk", "wv"), "w_gate_hidden": ("w1", "w3")}


def to_hugging_face(path: str) -> str:
    """Returns ``path`` under Hugging Face's names; a path with none of MindFormers' names comes back unchanged."""
    for hugging_face, mindformers in _PARTS:
        if path == mindformers or path.endswith("." + mindformers):
            return path[:-len(mindformers)] + hugging_face
    return path


def to_mindformers(path: str) -> str:
    """Returns ``path`` under MindFormers' names; a path with none of Hugging Face's names comes back unchanged."""
    for hugging_face, mindformers in _PARTS:
        if path == hugging_face or path.endswith("." + hugging_face):
            return path[:-len(hugging_face)] + mindformers
    return path


def aliases(path: str) -> Tuple[str, ...]:
    """Returns every path under which a user may name the cell at ``path``."""
    hugging_face = to_hugging_face(path)
    return (path,) if hugging_face == path else (path, hugging_face)


def concatenated_parts(path: str) -> List[str]:
    """Returns the paths that a concatenated cell stands for, or [] for any other cell."""
    parent, _, leaf = path.rpartition(".")
    return [f"{parent}.{part}" if parent else part for part in CONCATENATED.get(leaf, ())]


def collapse_numbers(paths: List[str]) -> List[str]:
    """Returns ``paths`` with those that differ in one layer number alone put into one, as ``layers.{0..31}.wq``."""
    groups = {}
    for path in paths:
        parts = path.split(".")
        numbers = [part for part in parts if part.isdigit()]
        shape = ".".join("#" if part.isdigit() else part for part in parts)
        groups.setdefault(shape, []).append(numbers)
    lines = []
    for shape, numbers in groups.items():
        line = shape
        for position in range(shape.count("#")):
            values = sorted({int(row[position]) for row in numbers})
            consecutive = values == list(range(values[0], values[-1] + 1)) and len(values) > 1
            text = f"{{{values[0]}..{values[-1]}}}" if consecutive else (
                str(values[0]) if len(values) == 1 else "{" + ",".join(map(str, values)) + "}")
            line = line.replace("#", text, 1)
        lines.append(line)
    return lines
