"""Stacks pairs of single experts into one pair for each of a layer's two weights, and splits them again.

A layer's experts are stacked in two weights: gate_up_proj (gate_proj's rows before up_proj's) and down_proj. Their
pairs are A [experts, r, in] and B [experts, out, r]; pairs of a single expert are A [r, in] and B [out, r] for each of
gate_proj, up_proj and down_proj.
"""

import re
from typing import Dict, List

import numpy as np

from mindlora.core.errors import AdapterError, MissingTensorsError, RankMismatchError, ShapeMismatchError
from mindlora.core.numerics.dtypes import scaled, to_float32
from mindlora.core.numerics.pair_shapes import EXPERTS, Pair
from mindlora.core.text import listed
from mindlora.files.adapters.adapter import Adapter
from mindlora.models import names

# Hugging Face's name of a stacked weight -> the cells of a single expert that it joins by rows; in the order in which
# a module declares its weights.
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SINGLE = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)$")


def single_paths(adapter: Adapter) -> List[str]:
    """Returns the paths of pairs of single experts."""
    return [path for path in adapter.paths if is_single(path)]


def is_single(path: str) -> bool:
    """Returns whether ``path`` belongs to a single expert."""
    return _SINGLE.match(path) is not None


def stacked_paths(adapter: Adapter) -> List[str]:
    """Returns the paths of stacked pairs."""
    return [path for path in adapter.paths if adapter.layout(path) is EXPERTS]


def stack_pairs(adapter: Adapter) -> None:
    """Replaces the pairs of single experts in ``adapter`` by equivalent stacked ones.

    If gate_proj and up_proj share one A in every expert, the stacked pair has their rank; otherwise it has the sum of
    their ranks, A = [A_gate; A_up], and B is block-diagonal. Where scales differ, B is rescaled and rounded.

    Raises AdapterError if the adapter is not a plain LoRA, a single expert (or one of gate_proj and up_proj) lacks a
    pair that others of its layer have, or the experts of a layer differ in rank or shape.
    """
    # Path of the experts -> cell -> expert -> path.
    layers: Dict[str, Dict[str, Dict[int, str]]] = {}
    for path in single_paths(adapter):
        holder, expert, cell = path.rsplit(".", 2)
        layers.setdefault(holder, {}).setdefault(cell, {})[int(expert)] = path
    if layers and not adapter.variant.is_plain:
        raise AdapterError(
            f"{adapter.variant.name} ({adapter.variant.field}) of single experts cannot become one pair of a stacked "
            f"weight, at {listed(single_paths(adapter))}. Merge it into its base instead."
        )
    for holder, cells in layers.items():
        experts = 1 + max(map(max, cells.values()))
        for weight, members in STACKED.items():
            if cells.keys().isdisjoint(members):
                continue
            paths = [f"{holder}.{expert}.{member}" for member in members for expert in range(experts)]
            missing = [path for path in paths if (path, "A") not in adapter.tensors]
            if missing:
                raise MissingTensorsError(
                    f"The adapter has pairs of single experts but none for {listed(missing)}, and "
                    f"{' and '.join(members)} of all experts in a layer are one weight. Give an adapter of all experts."
                )
            _stack(adapter, names.to_mindformers(f"{holder}.{weight}"), paths, len(members))


def unstack_pairs(adapter: Adapter) -> None:
    """Replaces stacked pairs in ``adapter`` with pairs of single experts: the inverse of stack_pairs.

    If gate_proj and up_proj use separate halves of the rank in every expert, each gets its half; otherwise both get the
    whole A.
    """
    for path in stacked_paths(adapter):
        holder, _, weight = names.to_hugging_face(path).rpartition(".")
        members = STACKED[weight]
        pairs = _split_rows(adapter.tensors[path, "A"], adapter.tensors[path, "B"], len(members))
        alpha = adapter.alphas.get(path)
        rank = adapter.rank(path)
        adapter.remove(path)
        for member, (a, b) in zip(members, pairs):
            for expert in range(len(a)):
                single = f"{holder}.{expert}.{member}"
                adapter.tensors[single, "A"] = np.ascontiguousarray(a[expert])
                adapter.tensors[single, "B"] = np.ascontiguousarray(b[expert])
                if alpha is not None:
                    adapter.alphas[single] = alpha * adapter.alpha_growth(adapter.rank(single) / rank)


def _stack(adapter: Adapter, path: str, paths: List[str], members: int) -> None:
    """Replaces the pairs of single experts at ``paths``, member after member, by one stacked pair at ``path``."""
    ranks = sorted({adapter.rank(single) for single in paths})
    if len(ranks) > 1:
        raise RankMismatchError(
            f"The pairs of single experts that make up {path} have the ranks {', '.join(map(str, ranks))}, but one "
            "stacked pair has one rank. Keep the pairs of single experts, or bring them to one rank (mindlora adapter "
            "resize)."
        )
    alpha = adapter.alphas[paths[0]]
    pairs = _of_one_scale(adapter, paths)
    experts = len(paths) // members
    stacks = []
    for begin in range(0, len(paths), experts):
        of_member = pairs[begin : begin + experts]
        if len({(a.shape, b.shape) for a, b in of_member}) > 1:
            raise ShapeMismatchError(
                "Single experts of one layer have pairs of different shapes: "
                f"{listed(paths[begin : begin + experts])}. Load the adapter into the model it was trained on."
            )
        stacks.append((np.stack([a for a, _ in of_member]), np.stack([b for _, b in of_member])))
    a, b = _joined_rows(stacks, path)
    for single in paths:
        adapter.remove(single)
    adapter.tensors[path, "A"] = a
    adapter.tensors[path, "B"] = b
    adapter.alphas[path] = alpha * adapter.alpha_growth(adapter.rank(path) / ranks[0])


def _of_one_scale(adapter: Adapter, paths: List[str]) -> List[Pair]:
    """Returns A and B at each path, with B rescaled to the scale of the first; in float32 if dtypes differ."""
    pairs = [(adapter.tensors[path, "A"], adapter.tensors[path, "B"]) for path in paths]
    if len({array.dtype for pair in pairs for array in pair}) > 1:
        pairs = [(to_float32(a), to_float32(b)) for a, b in pairs]
    scale = adapter.scale(paths[0])
    return [(a, scaled(b, adapter.scale(path) / scale)) for path, (a, b) in zip(paths, pairs)]


def _joined_rows(stacks: List[Pair], path: str) -> Pair:
    """Returns the stacked pair of a weight that joins one or two cells by rows."""
    (a, b), *others = stacks
    if not others:
        return a, b
    ((other_a, other_b),) = others
    if other_a.shape[2] != a.shape[2]:
        raise ShapeMismatchError(
            f"gate_proj and up_proj take inputs of different sizes, so they cannot make up {path}. Load the adapter "
            "into the model it was trained on."
        )
    if a.tobytes() == other_a.tobytes():
        return a, np.concatenate([b, other_b], axis=1)
    upper = np.concatenate([b, np.zeros_like(other_b, shape=(*b.shape[:2], other_b.shape[2]))], axis=2)
    lower = np.concatenate([np.zeros_like(b, shape=(*other_b.shape[:2], b.shape[2])), other_b], axis=2)
    return np.concatenate([a, other_a], axis=1), np.concatenate([upper, lower], axis=1)


def _split_rows(a: np.ndarray, b: np.ndarray, members: int) -> List[Pair]:
    """Returns the pairs of the ``members`` cells that a stacked weight joins by rows: the inverse of _joined_rows."""
    if members == 1:
        return [(a, b)]
    gate, up = np.split(b, 2, axis=1)
    half = a.shape[1] // 2
    if a.shape[1] % 2 or to_float32(gate[:, :, half:]).any() or to_float32(up[:, :, :half]).any():
        return [(a, gate), (a, up)]
    return [(a[:, :half], gate[:, :, :half]), (a[:, half:], up[:, :, half:])]
