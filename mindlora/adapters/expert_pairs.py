"""Pairs of single experts to one stacked pair for each of a layer's two weights, and back.

A layer's experts are stacked in two weights: gate_up_proj (gate_proj's rows before up_proj's) and down_proj. Their
pairs are A [experts, r, in] and B [experts, out, r]; those of a single expert are A [r, in] and B [out, r] each of
gate_proj, up_proj and down_proj.
"""

import math
import re
from typing import Dict, List

import numpy as np

from mindlora.adapters.adapter import Adapter
from mindlora.common.text import listed
from mindlora.errors import AdapterError, MissingTensorsError, RankMismatchError, ShapeMismatchError
from mindlora.models import names
from mindlora.numerics.dtypes import from_float32, to_float32
from mindlora.numerics.pair_layouts import EXPERTS, Pair

# Hugging Face's name of a stacked weight -> the cells of a single expert that it joins by rows; in the order in which
# a module declares its weights.
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SINGLE = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)$")


def single_paths(adapter: Adapter) -> List[str]:
    """Returns the paths of pairs of single experts."""
    return [path for path in adapter.paths if is_single(path)]


def is_single(path: str) -> bool:
    """Tells whether ``path`` is a single expert's."""
    return _SINGLE.match(path) is not None


def stacked_paths(adapter: Adapter) -> List[str]:
    """Returns the paths of stacked pairs."""
    return [path for path in adapter.paths if adapter.layout(path) is EXPERTS]


def stack_pairs(adapter: Adapter) -> None:
    """Replaces the pairs of single experts in ``adapter`` by stacked ones, which do the same.

    If gate_proj and up_proj share one A in every expert, the stacked pair has their rank; otherwise it has the sum of
    their ranks, A = [A_gate; A_up], and B is block-diagonal. Where scales differ, B is rescaled and rounded.

    Args:
        adapter (Adapter): Changed in place.

    Raises:
        MissingTensorsError: A single expert lacks a pair that others of its layer have, or only one of gate_proj and
            up_proj has one.
        RankMismatchError: The experts of a layer have different ranks.
        ShapeMismatchError: Their cells have different shapes.
        AdapterError: The adapter is not a plain LoRA.
    """
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
        experts = 1 + max(expert for found in cells.values() for expert in found)
        for weight, members in STACKED.items():
            if any(member in cells for member in members):
                _check_complete(holder, cells, members, experts)
                paths = [[cells[member][expert] for expert in range(experts)] for member in members]
                _stack(adapter, names.to_mindformers(f"{holder}.{weight}"), paths)


def split_pairs(adapter: Adapter) -> None:
    """Replaces stacked pairs in ``adapter`` by pairs of single experts: the reverse of stack_pairs.

    If gate_proj and up_proj use one half of the rank each, in every expert, each gets its half; otherwise both have the
    whole A.

    Args:
        adapter (Adapter): Changed in place.
    """
    for path in stacked_paths(adapter):
        holder, _, weight = names.to_hugging_face(path).rpartition(".")
        a, b = (adapter.tensors[path, half] for half in "AB")
        alpha, rank = adapter.alphas.get(path), adapter.rank(path)
        _remove(adapter, [path])
        for member, (own_a, own_b) in zip(STACKED[weight], _split_rows(a, b, len(STACKED[weight]))):
            for expert in range(len(a)):
                own = f"{holder}.{expert}.{member}"
                adapter.tensors[own, "A"] = np.ascontiguousarray(own_a[expert])
                adapter.tensors[own, "B"] = np.ascontiguousarray(own_b[expert])
                if alpha is not None:
                    adapter.alphas[own] = alpha * _growth(adapter, adapter.rank(own) / rank)


def _check_complete(holder, cells, members, experts) -> None:
    wanted = [(expert, member) for member in members for expert in range(experts)]
    lacking = [f"{holder}.{expert}.{member}" for expert, member in wanted if expert not in cells.get(member, {})]
    if lacking:
        raise MissingTensorsError(
            f"The adapter has pairs of single experts but none for {listed(lacking)}, and {' and '.join(members)} of "
            "all experts in a layer are one weight. Give an adapter of all experts."
        )


def _stack(adapter: Adapter, path: str, members: List[List[str]]) -> None:
    """Replaces the pairs of single experts, whose paths are given by member and expert, by one at ``path``."""
    every = [own for paths in members for own in paths]
    ranks = sorted({adapter.rank(own) for own in every})
    if len(ranks) > 1:
        raise RankMismatchError(
            f"The pairs of single experts that make up {path} have the ranks {', '.join(map(str, ranks))}, and one "
            "stacked pair has one rank. Keep the pairs of single experts, or bring them to one rank (mindlora resize)."
        )
    scale, alpha = adapter.scale(every[0]), adapter.alphas[every[0]]
    stacks = [_stacked(adapter, paths, scale, _has_one_dtype(adapter, every)) for paths in members]
    a, b = _joined_rows(stacks, path)
    _remove(adapter, every)
    adapter.tensors[path, "A"], adapter.tensors[path, "B"] = a, b
    adapter.alphas[path] = alpha * _growth(adapter, adapter.rank(path) / ranks[0])


def _stacked(adapter: Adapter, paths: List[str], scale: float, as_they_are: bool) -> Pair:
    """Returns A and B of some pairs in stacks, with B for ``scale``; as float32 unless they are taken as they are."""
    pairs = []
    for path in paths:
        a, b = (adapter.tensors[path, half] for half in "AB")
        if not as_they_are:
            a, b = to_float32(a), to_float32(b)
        if adapter.scale(path) != scale:
            b = from_float32(to_float32(b) * np.float32(adapter.scale(path) / scale), b.dtype)
        pairs.append((a, b))
    if len({(a.shape, b.shape) for a, b in pairs}) > 1:
        raise ShapeMismatchError(f"Single experts of one layer have pairs of different shapes: {listed(paths)}.")
    return np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs])


def _joined_rows(stacks: List[Pair], path: str) -> Pair:
    """Returns the stacked pair of a weight that joins one or two cells by rows."""
    (a, b), *others = stacks
    if not others:
        return a, b
    ((other_a, other_b),) = others
    if other_a.shape[2] != a.shape[2]:
        raise ShapeMismatchError(
            f"gate_proj and up_proj take inputs of different sizes, so they cannot make up {path}."
        )
    if a.tobytes() == other_a.tobytes():
        return a, np.concatenate([b, other_b], axis=1)
    upper = np.concatenate([b, np.zeros_like(other_b, shape=(*b.shape[:2], other_b.shape[2]))], axis=2)
    lower = np.concatenate([np.zeros_like(b, shape=(*other_b.shape[:2], b.shape[2])), other_b], axis=2)
    return np.concatenate([a, other_a], axis=1), np.concatenate([upper, lower], axis=1)


def _split_rows(a: np.ndarray, b: np.ndarray, members: int) -> List[Pair]:
    """Returns the pairs of the ``members`` cells that a stacked weight joins by rows: the reverse of _joined_rows."""
    if members == 1:
        return [(a, b)]
    (gate, up), half = np.split(b, 2, axis=1), a.shape[1] // 2
    if a.shape[1] % 2 or to_float32(gate[:, :, half:]).any() or to_float32(up[:, :, :half]).any():
        return [(a, gate), (a, up)]
    return [(a[:, :half], gate[:, :, :half]), (a[:, half:], up[:, :, half:])]


def _has_one_dtype(adapter: Adapter, paths: List[str]) -> bool:
    return len({adapter.tensors[path, half].dtype for path in paths for half in "AB"}) == 1


def _growth(adapter: Adapter, ranks: float) -> float:
    """Returns the factor on lora_alpha that keeps the scale where the rank grows by the factor ``ranks``."""
    return math.sqrt(ranks) if adapter.use_rslora else ranks


def _remove(adapter: Adapter, paths: List[str]) -> None:
    for path in paths:
        adapter.alphas.pop(path, None)
        for half in "AB":
            del adapter.tensors[path, half]
