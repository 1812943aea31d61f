"""MindFormers' qkv_concat: the row order of w_qkv and w_gate_hidden, and LoRA pairs joined and split along with them.

w_qkv keeps its rows by key-value head, [heads of q that share it | k | v], and w_gate_hidden those of w1 and w3 in
turn.
"""

import math
from typing import Dict, List, Optional

import numpy as np

from mindlora.adapters.adapter import Adapter
from mindlora.errors import AdapterError, ShapeMismatchError
from mindlora.models import names
from mindlora.models.joined_rows import join_rows, split_rows
from mindlora.numerics.dtypes import from_float32, to_float32


def join_pairs(adapter: Adapter, path: str, out_channels: int, kv_heads: Optional[int] = None) -> None:
    """Replaces the pairs of wq, wk, wv (or of w1, w3) in ``adapter`` by one for the concatenated cell at ``path``.

    A = [A_q; A_k; A_v] and B is block-diagonal, its rows in the order of the cell's, and so are DoRA's magnitudes; the
    scale stays, since lora_alpha grows as the rank does. A part without a pair gets rows of zeros. Parts that all share
    one A, as split_pairs leaves those of a pair that was trained as one, become that pair again, with its rank.

    Args:
        adapter (Adapter): Changed in place; it holds a pair for at least one of the parts.
        path (str): Path that ends in w_qkv or w_gate_hidden.
        out_channels (int): Rows of the concatenated weight.
        kv_heads (int): Number of key-value heads, for w_qkv. Default: None.

    Raises:
        ShapeMismatchError: The parts do not make up ``out_channels`` rows or take different inputs.
        AdapterError: kv_heads is needed and missing, or does not divide the rows; or a part has no pair, and so no
            magnitude, where the others have one.
    """
    _refuse_vera(adapter, path)
    cell = names.joined_cell(path)
    parts = cell.paths(path)
    present = [part for part in parts if (part, "A") in adapter.tensors]
    rows = _part_rows(adapter, path, cell, present, out_channels)
    groups = _groups(path, cell, list(rows.values()), kv_heads)
    scale = adapter.scale(present[0])
    if len({adapter.tensors[part, half].dtype for part in present for half in "AB"}) > 1:
        # float32 holds each of float16 and bfloat16.
        adapter.tensors.update(
            {(part, half): to_float32(adapter.tensors[part, half]) for part in present for half in adapter.parts(part)}
        )
    blocks_a = [adapter.tensors[part, "A"] for part in present]
    if len({a.shape[1] for a in blocks_a}) > 1:
        raise ShapeMismatchError(
            f"{', '.join(present)} take inputs of different sizes, so {path} cannot stand for them."
        )
    columns = _columns(adapter, present, blocks_a, scale)
    total = max(own.stop for own in columns.values())
    blocks_b = {}
    for part in parts:
        blocks_b[part] = np.zeros((rows[part], total), adapter.tensors[present[0], "B"].dtype)
        if part in columns:
            blocks_b[part][:, columns[part]] = _rescaled(adapter.tensors[part, "B"], adapter.scale(part) / scale)
    magnitudes = _magnitudes(adapter, path, parts)
    growth = total / adapter.rank(present[0])
    if growth > 1:
        # The halves of each part are not those of the whole.
        adapter.initialization = None
    alpha = adapter.alphas[present[0]] * (math.sqrt(growth) if adapter.use_rslora else growth)
    for part in present:
        _remove(adapter, part)
    adapter.tensors[path, "A"] = np.concatenate(blocks_a)[:total]
    joined = {"B": list(blocks_b.values()), **magnitudes}
    for part, blocks in joined.items():
        adapter.tensors[path, part] = join_rows(blocks, groups)
    adapter.alphas[path] = alpha


def split_pairs(adapter: Adapter, path: str, kv_heads: Optional[int] = None, head_dim: Optional[int] = None) -> None:
    """Replaces the pair of a concatenated cell in ``adapter`` by pairs of its parts: the reverse of join_pairs.

    Where each part has columns of B to itself, as after join_pairs, it gets those and their rows of A; else the parts
    share A whole.

    Args:
        adapter (Adapter): Changed in place.
        path (str): Path that ends in w_qkv or w_gate_hidden, of a pair in ``adapter``.
        kv_heads, head_dim (int): Number of key-value heads and their size, for w_qkv. Default: None.

    Raises:
        AdapterError: kv_heads or head_dim is needed and missing, or does not fit the rows.
    """
    _refuse_vera(adapter, path)
    cell = names.joined_cell(path)
    parts = cell.paths(path)
    a, b = adapter.tensors[path, "A"], adapter.tensors[path, "B"]
    group = cell.layout.sizes(len(b), kv_heads, head_dim)
    if group is None:
        raise AdapterError(
            f"{path} stands for {', '.join(parts)} in {len(b)} rows, which {kv_heads} key-value heads "
            f"of size {head_dim} do not divide. Give the model's n_kv_heads and head size."
        )
    blocks = dict(zip(parts, split_rows(b, group)))
    sizes = adapter.parts(path).get("magnitude")
    if sizes is not None:
        split = split_rows(sizes, group)
    columns = _own_columns(blocks) or {part: slice(0, len(a)) for part in parts}
    alpha = adapter.alphas.get(path)
    _remove(adapter, path)
    for part, own in columns.items():
        adapter.tensors[part, "A"] = np.ascontiguousarray(a[own])
        adapter.tensors[part, "B"] = np.ascontiguousarray(blocks[part][:, own])
        if sizes is not None:
            adapter.tensors[part, "magnitude"] = np.ascontiguousarray(split[parts.index(part)])
        if alpha is not None:
            share = adapter.rank(part) / len(a)
            adapter.alphas[part] = alpha * (math.sqrt(share) if adapter.use_rslora else share)


def _refuse_vera(adapter, path):
    if adapter.use_vera:
        raise AdapterError(
            f"{path} stands for {', '.join(names.joined_parts(path))}, and VeRA's vectors belong "
            "to rows of matrices that all cells share: they can be neither joined nor split. Build the "
            "model with qkv_concat as it was trained."
        )


def _part_rows(adapter, path, cell, present, out_channels) -> Dict[str, int]:
    """Returns the rows of each part; those of a part without a pair follow from the others'."""
    rows = {part: len(adapter.tensors[part, "B"]) for part in present}
    complete = cell.layout.complete([rows.get(part) for part in cell.paths(path)], out_channels)
    if complete is None:
        raise ShapeMismatchError(
            f"{path} has {out_channels} rows, which the adapter's "
            f"{', '.join(f'{part} with {rows[part]}' for part in present)} cannot be parts of."
        )
    return dict(zip(cell.paths(path), complete))


def _groups(path, cell, rows, kv_heads) -> int:
    groups = cell.layout.groups(rows, kv_heads)
    if groups is None:
        raise AdapterError(
            f"{path} keeps its rows by key-value head, and {kv_heads} of them do not divide "
            f"{', '.join(map(str, rows))} rows of q, k, v. Give the model's n_kv_heads."
        )
    return groups


def _magnitudes(adapter, path, parts) -> Dict[str, List[np.ndarray]]:
    """Returns {"magnitude": those of the parts}, or {} without DoRA."""
    if not adapter.use_dora:
        return {}
    lacking = [part for part in parts if (part, "magnitude") not in adapter.tensors]
    if lacking:
        raise AdapterError(
            f"{path} stands for {', '.join(parts)}, and the DoRA adapter has none for "
            f"{', '.join(lacking)}: what the magnitudes of their rows are, only the base says. Build "
            "the model with qkv_concat: False."
        )
    return {"magnitude": [adapter.tensors[part, "magnitude"] for part in parts]}


def _columns(adapter, present, blocks_a, scale) -> Dict[str, slice]:
    """Returns the columns of the joined B that each part fills: the same for all that share one A, else its own."""
    shared = all(a.tobytes() == blocks_a[0].tobytes() for a in blocks_a)
    if shared and all(adapter.scale(part) == scale for part in present):
        return dict.fromkeys(present, slice(0, len(blocks_a[0])))
    ends = np.cumsum([len(a) for a in blocks_a])
    return {part: slice(int(end) - len(a), int(end)) for part, a, end in zip(present, blocks_a, ends)}


def _own_columns(blocks) -> Dict[str, slice]:
    """Returns the columns of B that each part has to itself, or {} where the parts share some or leave some out."""
    own, begin = {}, 0
    for part, block in blocks.items():
        used = np.flatnonzero((to_float32(block) != 0).any(axis=0))
        if used.size:
            if used[0] != begin or used[-1] != begin + used.size - 1:
                return {}
            own[part] = slice(begin, begin + used.size)
            begin += used.size
    return own if begin == block.shape[1] else {}


def _rescaled(b, factor) -> np.ndarray:
    return b if factor == 1 else from_float32(to_float32(b) * np.float32(factor), b.dtype)


def _remove(adapter, path):
    adapter.alphas.pop(path, None)
    for part in adapter.parts(path):
        del adapter.tensors[path, part]
