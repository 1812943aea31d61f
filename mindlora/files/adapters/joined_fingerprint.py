"""Fingerprints of a base whose cells are apart, as its networks were trained that have some of them joined."""

from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import LoraError
from mindlora.core.numerics.pair_shapes import Shape
from mindlora.files.adapters.fingerprint import (
    fingerprint_from,
    sampled_elements,
    sampled_elements_of_rows,
    sampled_paths,
)
from mindlora.files.adapters.joined_pairs import joined_weight
from mindlora.models import names
from mindlora.models.architectures.joined_rows import PartAfterPart, QueryKeyValueInTurn, RowLayout

# The orders of rows in which MindFormers' mcore models train, as use_contiguous_weight_layout_attention and
# use_interleaved_weight_layout_mlp ask for them: name of a joined cell -> its layout, if not its record's.
_QKV, _GATE_UP = {"linear_qkv": QueryKeyValueInTurn()}, {"linear_fc1": PartAfterPart()}
ROW_ORDERS: Tuple[Mapping[str, RowLayout], ...] = ({}, _QKV, _GATE_UP, {**_QKV, **_GATE_UP})


def mcore_path(path: str) -> str:
    """Returns the path in mcore of the cell that computes what the one at ``path`` does."""
    legacy = names.to_mindformers(path)
    return names.to_mcore(names.joined_path(legacy) or legacy)


def sample_of_joined(
    path: str, parts: Sequence[np.ndarray], kv_heads: Optional[int], layouts: Mapping[str, RowLayout]
) -> np.ndarray:
    """Returns sampled_elements of the weight of the joined cell at ``path``, in mcore, from those of its parts."""
    if len(parts) == 1:
        return sampled_elements(parts[0])
    rows = [len(part) for part in parts]
    numbers = np.split(np.arange(sum(rows)), np.cumsum(rows)[:-1])
    order = joined_weight(path, numbers, kv_heads, layouts.get(path.rpartition(".")[2]))
    return sampled_elements_of_rows(parts, order)


def fingerprints_of_checkpoint(
    paths: Sequence[str], shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray], kv_heads: Optional[int]
) -> Iterator[dict]:
    """Yields the fingerprints of a base in files under an adapter, one for each way in which it can have been trained.

    They are those of the cells as the files have them, of the legacy models' joined cells, and of mcore's in each order
    of rows; those for which the base lacks a weight, or whose rows cannot be joined, are left out.

    Args:
        paths (sequence of str): The adapted cells (MindFormers' names).
        shapes (mapping): Path -> shape of the base's weight there.
        read (callable): Takes a path, and returns the weight. It is called for the sampled ones alone.
        kv_heads (int): Key-value heads, if known.
    """
    yield from _fingerprints({path: [path] for path in paths}, shapes, read, kv_heads)
    legacy: Dict[str, List[str]] = {}
    mcore: Dict[str, List[str]] = {}
    for path in paths:
        joined = names.joined_path(path)
        legacy[joined or path] = mcore[mcore_path(path)] = names.joined_parts(joined) if joined else [path]
    yield from _fingerprints(legacy, shapes, read, kv_heads)
    yield from _fingerprints(mcore, shapes, read, kv_heads, ROW_ORDERS)


def _fingerprints(
    cells: Mapping[str, List[str]],
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    kv_heads: Optional[int],
    orders: Sequence[Mapping[str, RowLayout]] = ({},),
) -> Iterator[dict]:
    """Yields the fingerprint of trained cells, path -> the paths of their parts in the base, for each order of rows."""
    if not all(part in shapes for parts in cells.values() for part in parts):
        return
    sizes = {}
    for path, parts in cells.items():
        sizes[path] = (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
    weights = {path: list(map(read, cells[path])) for path in sampled_paths(cells)}
    for layouts in orders:
        try:
            samples = {path: sample_of_joined(path, parts, kv_heads, layouts) for path, parts in weights.items()}
        except LoraError:
            # The rows of a joined cell need what is not known of the base.
            continue
        yield fingerprint_from(sizes, samples)
