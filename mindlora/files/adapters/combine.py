"""Combines several adapters of one base into one, as PEFT's add_weighted_adapter does, in NumPy, without a network."""

import math
from typing import Callable, Dict, List, Optional, Tuple

import numpy as np
from tqdm import tqdm

from mindlora.core.errors import AdapterError, ConfigError, RankMismatchError, ShapeMismatchError
from mindlora.core.fields import COUNT, check_number
from mindlora.core.numerics.pair_shapes import LAYOUTS, Pair
from mindlora.core.text import listed, suggestion
from mindlora.files.adapters import tied_embeddings
from mindlora.files.adapters.adapter import Adapter, listed_parts
from mindlora.files.adapters.expert_pairs import single_paths, stacked_paths
from mindlora.files.adapters.spectrum import pair_svd

# Method -> (pruning of each tensor, merging of the stack [n, ...] of n adapters), by the names in _rule. Without
# `_svd` it is applied to A and to B, with `_svd` to the products B A.
_RECIPES = {
    "linear": ("keep", "add"),
    "magnitude_prune": ("largest", "add"),
    "ties": ("largest", "elect"),
    "dare_linear": ("random", "add"),
    "dare_ties": ("random", "elect"),
}
METHODS = (
    "linear",
    "cat",
    "svd",
    *(method for method in _RECIPES if method != "linear"),
    *(f"{method}_svd" for method in _RECIPES if method != "linear"),
)
MAJORITY_SIGNS = ("total", "frequency")

# (pairs in float32, weights, scales, rank) -> pair.
_Rule = Callable[[List[Pair], List[float], List[float], int], Pair]


def combine_adapters(
    adapters: List[Adapter],
    weights: List[float],
    method: str,
    *,
    svd_rank: Optional[int] = None,
    density: Optional[float] = None,
    majority_sign: str = "total",
    seed: int = 0,
) -> Adapter:
    """Returns one adapter that replaces several, each with a weight; the arithmetic is PEFT's, in float32.

    With w_i = weights[i] * adapters[i].scale(path), and the sums over the adapters that adapt a path:

    - ``cat``: A = [w_1 A_1; w_2 A_2; ...], B = [B_1, B_2, ...]. Exact: B A is the sum of w_i B_i A_i. The rank is the
      sum of the adapters' ranks; zeros fill up the rank if an adapter lacks a path.
    - ``svd``: the ``svd_rank`` largest singular values of the sum of w_i B_i A_i = U S V^T: A = V^T, B = U S.
    - ``linear``: A = sum of sign(w_i) sqrt|w_i| A_i, B = sum of sqrt|w_i| B_i. Cheap and approximate: B A also contains
      the products B_i A_j of different adapters.
    - ``magnitude_prune``: linear, with all but the largest elements of each A_i and B_i set to zero first.
    - ``ties``: the same pruning; then each element takes the sign of the adapters' majority, and the mean of w_i A_i
      over those that have this sign (Yadav et al., TIES-Merging, 2023).
    - ``dare_linear``, ``dare_ties``: instead of the pruning, random elements are set to zero and the rest is divided by
      ``density`` (Yu et al., Language Models are Super Mario, 2024).
    - ``magnitude_prune_svd``, ``ties_svd``, ``dare_linear_svd``, ``dare_ties_svd``: the same on the products
      scale B_i A_i with weights[i], and then svd. They form a matrix [out, in] and take its full svd, path by path:
      minutes for each cell of a large model.

    Stacked experts are combined one by one, each as a separate cell; PEFT refuses them.

    Two things differ from PEFT: the result never has use_rslora, whereas PEFT keeps that of the first adapter and so
    scales the result by sqrt(r); and ``method`` applies even to a single adapter, whereas PEFT then uses linear.

    Args:
        adapters (list of Adapter): At least one. A path may be missing in some of them.
        weights (list of float): One for each adapter; may be negative.
        method (str): One of METHODS.
        svd_rank (int): Rank of the result, for the methods that end in svd; less where a cell is smaller. Default:
            None, the largest rank of the adapters.
        density (float): Share of the elements that is kept, in (0, 1]; for the methods that prune. Default: None.
        majority_sign (str): ``total``, the sign of the sum of the pruned elements (without the weights), or
            ``frequency``, the sign that most of them have; for the ties methods. Default: ``total``.
        seed (int): Seed of the random pruning of the dare methods. Default: 0.

    Returns:
        Adapter, float32, with lora_alpha equal to the rank at each path, so the scale is 1. Its dropout is the first
        adapter's.

    Raises:
        ConfigError: An argument is wrong, or is one that the method does not take.
        AdapterError: An adapter has saved modules, is not a plain LoRA of linear cells, embeddings and stacked experts,
            shares no path with any other adapter, or is not finite; or some have stacked experts and others pairs of
            single ones.
        RankMismatchError: The ranks at a path differ, but the method needs equal ones.
        ShapeMismatchError: The cells at a path differ in shape.
        ScaleMismatchError: An adapter does not state lora_alpha.
    """
    _check_arguments(adapters, weights, method, svd_rank, density, majority_sign)
    _check_adapters(adapters)
    _check_expert_forms(adapters)
    paths = list(dict.fromkeys(path for adapter in adapters for path in adapter.paths))
    if method != "cat" and not method.endswith("svd"):
        _check_equal_ranks(adapters, paths, method)
    rule = _rule(method, density, majority_sign, np.random.default_rng(seed))
    largest = [max(map(adapter.rank, adapter.paths)) for adapter in adapters]
    rank = sum(largest) if method == "cat" else svd_rank or max(largest)

    tensors = {}
    for path in tqdm(paths, desc=f"combining ({method})", unit="cell", delay=1, leave=False, disable=None):
        there = [(adapter, weight) for adapter, weight in zip(adapters, weights) if (path, "A") in adapter.tensors]
        tensors[path, "A"], tensors[path, "B"] = _combined_cell(path, there, rule, rank)
    first = adapters[0]
    return Adapter(
        tensors,
        alphas={path: float(tensors[path, "B"].shape[-1]) for path in paths},
        dropout=first.dropout,
        saved_modules=_base_tables(adapters),
        dialect=first.dialect,
        embeddings=set().union(*(adapter.embeddings for adapter in adapters)),
        bare_prefix=first.bare_prefix if all(adapter.bare_prefix for adapter in adapters) else "",
        base_model=next((adapter.base_model for adapter in adapters if adapter.base_model), None),
        fingerprint=first.fingerprint
        if all(adapter.fingerprint == first.fingerprint for adapter in adapters)
        else None,
    )


def _combined_cell(path: str, adapters: List[Tuple[Adapter, float]], rule: _Rule, rank: int) -> Pair:
    """Returns the pair at ``path`` of adapters with weights, combined by ``rule``."""
    pairs = [adapter.pair(path) for adapter, _ in adapters]
    weights = [weight for _, weight in adapters]
    scales = [adapter.scale(path) for adapter, _ in adapters]
    layout = adapters[0][0].layout(path)
    products = zip(*(layout.products(*pair) for pair in pairs))
    results = [rule(list(of_one), weights, scales, rank) for of_one in products]
    return layout.stacked_again(results, *(half.shape for half in pairs[0]))


def _rule(method: str, density: Optional[float], majority_sign: str, random: np.random.Generator) -> _Rule:
    """Returns the function (pairs, weights, scales, rank) -> pair that computes ``method``."""
    if method == "cat":
        return _cat
    if method == "svd":
        return _svd_of_sum
    on_products = method.endswith("_svd")
    prune, merge = _RECIPES[method.removesuffix("_svd")]
    share = 1.0 if density is None else density
    pruned = {
        "keep": lambda tensor: tensor,
        "largest": lambda tensor: keep_largest(tensor, share),
        "random": lambda tensor: keep_random(tensor, share, random),
    }[prune]
    merged = {"add": _add, "elect": lambda stack, weights: _elect(stack, weights, majority_sign)}[merge]

    def combined(tensors: List[np.ndarray], weights: List[float]) -> np.ndarray:
        return merged(np.stack([pruned(tensor) for tensor in tensors]), np.asarray(weights, np.float32))

    def of_a_and_b(pairs: List[Pair], weights: List[float], scales: List[float], _: int) -> Pair:
        scaled = [weight * scale for weight, scale in zip(weights, scales)]
        # Only A gets the sign: if both had it, it would cancel in the product.
        return (
            combined([a for a, _ in pairs], [math.copysign(math.sqrt(abs(value)), value) for value in scaled]),
            combined([b for _, b in pairs], [math.sqrt(abs(value)) for value in scaled]),
        )

    def of_products(pairs: List[Pair], weights: List[float], scales: List[float], rank: int) -> Pair:
        products = [(b @ a) * np.float32(scale) for (a, b), scale in zip(pairs, scales)]
        u, s, vh = np.linalg.svd(combined(products, weights), full_matrices=False)
        return _truncated(u, s, vh, rank)

    return of_products if on_products else of_a_and_b


def keep_largest(tensor: np.ndarray, density: float) -> np.ndarray:
    """Returns ``tensor`` with all but its int(density * size) elements of the largest magnitude set to zero.

    Source: Yadav et al., TIES-Merging, 2023.
    """
    kept = int(density * tensor.size)
    if kept == tensor.size:
        return tensor
    result = np.zeros(tensor.size, tensor.dtype)
    flat = tensor.reshape(-1)
    largest = np.argpartition(-np.abs(flat), kept)[:kept]
    result[largest] = flat[largest]
    return result.reshape(tensor.shape)


def keep_random(tensor: np.ndarray, density: float, random: np.random.Generator) -> np.ndarray:
    """Returns ``tensor`` with each element kept with probability ``density`` and then divided by it, else zero.

    Source: Yu et al., Language Models are Super Mario, 2024.
    """
    if density == 1:
        return tensor
    return np.where(random.random(tensor.shape, np.float32) < density, tensor / np.float32(density), np.float32(0))


def _add(stack: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.tensordot(weights, stack, axes=1)


def _elect(stack: np.ndarray, weights: np.ndarray, majority_sign: str) -> np.ndarray:
    """Returns the mean over the tensors that have the elected sign; zero if none has it."""
    votes = stack if majority_sign == "total" else np.sign(stack)
    elected = np.where(votes.sum(axis=0) >= 0, np.float32(1), np.float32(-1))
    agrees = np.sign(stack) == elected
    return _add(stack * agrees, weights) / np.maximum(agrees.sum(axis=0), 1).astype(np.float32)


def _cat(pairs: List[Pair], weights: List[float], scales: List[float], rank: int) -> Pair:
    a = np.concatenate(
        [a * np.float32(weight) * np.float32(scale) for (a, _), weight, scale in zip(pairs, weights, scales)]
    )
    b = np.concatenate([b for _, b in pairs], axis=1)
    # One rank for all paths: few adapter servers support PEFT's rank_pattern.
    fill = (0, rank - a.shape[0])
    return np.pad(a, (fill, (0, 0))), np.pad(b, ((0, 0), fill))


def _svd_of_sum(pairs: List[Pair], weights: List[float], scales: List[float], rank: int) -> Pair:
    """Returns the svd of B A for A and B of ``_cat``, which has at most their rank: no matrix [out, in] is needed."""
    a, b = _cat(pairs, weights, scales, sum(a.shape[0] for a, _ in pairs))
    u, s, vh = pair_svd(a, b, 1.0)
    a, b = _truncated(u, s, vh, rank)
    # Beyond the rank of the sum, the singular values and the rows of A and columns of B are zero.
    fill = (0, min(rank, a.shape[1], b.shape[0]) - a.shape[0])
    return np.pad(a, (fill, (0, 0))), np.pad(b, ((0, 0), fill))


def _truncated(u: np.ndarray, s: np.ndarray, vh: np.ndarray, rank: int) -> Pair:
    return np.ascontiguousarray(vh[:rank], np.float32), (u[:, :rank] * s[:rank]).astype(np.float32)


def _check_arguments(
    adapters: List[Adapter],
    weights: List[float],
    method: str,
    svd_rank: Optional[int],
    density: Optional[float],
    majority_sign: str,
) -> None:
    if method not in METHODS:
        raise ConfigError(f"method is {method!r}, which is not known.{suggestion(str(method), list(METHODS))}")
    if not adapters:
        raise ConfigError("combine_adapters has no adapter to combine: name at least one, with its weight.")
    if len(adapters) != len(weights):
        raise ConfigError(f"{len(adapters)} adapters have {len(weights)} weights: give each adapter one weight.")
    for weight in weights:
        if not math.isfinite(weight):
            raise ConfigError(f"A weight is {weight}: it must be a finite number.")
    prunes = method != "svd" and _RECIPES.get(method.removesuffix("_svd"), ("keep",))[0] != "keep"
    if prunes and density is None:
        raise ConfigError(f"method {method} needs density: the share of elements to keep, above 0 and up to 1.")
    if density is not None and not prunes:
        raise ConfigError(f"density is {density}, but method {method} prunes nothing: leave density out.")
    if density is not None and not 0 < density <= 1:
        raise ConfigError(f"density is {density}: it must be above 0 and at most 1.")
    if svd_rank is not None and not method.endswith("svd"):
        raise ConfigError(
            f"svd_rank is {svd_rank}, but method {method} takes its rank from the adapters: leave svd_rank "
            "out, or use svd."
        )
    if svd_rank is not None:
        check_number(svd_rank, "svd_rank", COUNT)
    if majority_sign not in MAJORITY_SIGNS:
        raise ConfigError(
            f"majority_sign is {majority_sign!r}, which is not known."
            f"{suggestion(str(majority_sign), list(MAJORITY_SIGNS))}"
        )


def _check_adapters(adapters: List[Adapter]) -> None:
    sizes: Dict[str, Tuple[int, List[int]]] = {}
    for number, adapter in enumerate(adapters, 1):
        label = f"Adapter {number}"
        if adapter.trained_modules:
            raise AdapterError(
                f"{label} holds saved modules (modules_to_save), which cannot be combined: "
                f"{listed(adapter.trained_modules)}. Merge this adapter into the base first, or leave it out."
            )
        variant = adapter.variant
        if variant.cannot_combine:
            raise AdapterError(
                f"{label} is a {variant.name} adapter ({variant.field}), which cannot be combined: "
                f"{variant.cannot_combine}. Merge the adapters into the base one after the other instead."
            )
        for layout in LAYOUTS:
            refused = [path for path in adapter.paths if adapter.layout(path) is layout and not layout.can_combine]
            if refused:
                raise AdapterError(
                    f"{label} adapts {layout.cells}, which cannot be combined: {listed(refused)}. Merge the adapters "
                    "into the network one after the other instead (merge_and_unload)."
                )
        adapter.check_pairs(label)
        adapter.check_finite(label)
        for path in adapter.paths:
            adapter.scale(path)
            # [out, in], or [experts, out, in] for stacked experts.
            size = [*adapter.tensors[path, "B"].shape[:-1], adapter.tensors[path, "A"].shape[-1]]
            other, first_size = sizes.setdefault(path, (number, size))
            if size != first_size:
                raise ShapeMismatchError(
                    f"{label} was trained on a different base from adapter {other}: the weight of {path} "
                    f"{'[experts, out, in]' if adapter.layout(path).stacked else '[out, in]'} is {size} in one and "
                    f"{first_size} in the other. Combine adapters of one base."
                )
        others = {path for other in adapters if other is not adapter for path in other.paths}
        if others and not others & set(adapter.paths):
            raise AdapterError(
                f"{label} has no path in common with any other adapter, so nothing would be combined. It "
                f"adapts {listed_parts((path, '') for path in adapter.paths)}. Combine adapters of the same cells."
            )


def _base_tables(adapters: List[Adapter]) -> Dict[str, np.ndarray]:
    """Returns the base's own tables stored beside pairs; raises AdapterError if they differ between adapters."""
    tables: Dict[str, np.ndarray] = {}
    for number, adapter in enumerate(adapters, 1):
        for name in adapter.base_tables:
            table = tables.setdefault(name, adapter.saved_modules[name])
            if not tied_embeddings.is_copy(adapter.saved_modules[name], table):
                raise AdapterError(
                    f"Adapter {number} and one before it hold different values of {name}, the weight of the base under "
                    "their pairs: they were trained on different bases. Combine adapters of one base."
                )
    return tables


def _check_expert_forms(adapters: List[Adapter]) -> None:
    """Raises AdapterError if pairs of the same experts cannot be added because some are stacked and others single."""
    stacked = single = ""
    for number, adapter in enumerate(adapters, 1):
        for path in stacked_paths(adapter)[:1]:
            stacked = stacked or f"{number} ({path})"
        for path in single_paths(adapter)[:1]:
            single = single or f"{number} ({path})"
    if stacked and single:
        raise AdapterError(
            f"Adapter {stacked} has one pair for all experts of a layer, and adapter {single} a pair for each: they "
            "would not be added. Give all of them one form first (mindlora adapter convert --experts stacked, or "
            "single)."
        )


def _check_equal_ranks(adapters: List[Adapter], paths: List[str], method: str) -> None:
    for path in paths:
        ranks = [adapter.rank(path) for adapter in adapters if (path, "A") in adapter.tensors]
        if len(set(ranks)) > 1:
            raise RankMismatchError(
                f"method {method} needs adapters of equal rank; at {path} the ranks are "
                f"{', '.join(map(str, ranks))}. Methods cat and svd take any ranks."
            )
