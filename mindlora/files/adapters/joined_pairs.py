"""Joins the pairs of cells that MindFormers joins (qkv_concat), such as wq, wk, wv into w_qkv, and splits them again.

mindlora.models.architectures.joined_rows defines the order of the rows in a joined cell.
"""

from typing import Dict, List, Optional, Sequence

import numpy as np

from mindlora.core.errors import AdapterError, ShapeMismatchError
from mindlora.core.numerics.dtypes import scaled, to_float32
from mindlora.files.adapters.adapter import Adapter
from mindlora.models import names
from mindlora.models.architectures.joined_rows import HeadSizes, RowLayout, join_rows, split_rows


def join_pairs(
    adapter: Adapter, path: str, out_channels: int, kv_heads: Optional[int] = None, layout: Optional[RowLayout] = None
) -> None:
    """Replaces the pairs of the members of a joined cell (wq, wk, wv, or w1, w3) in ``adapter`` by one for the cell.

    A = [A_q; A_k; A_v] and B is block-diagonal. Its rows and DoRA's magnitudes are in the order of the cell's rows. The
    scale stays the same, since lora_alpha grows with the rank. A member without a pair gets rows of zeros. Members that
    all share one A, as after split_pairs of a jointly trained pair, become that pair again, with its rank.

    Args:
        adapter (Adapter): Changed in place; it holds a pair for at least one of the members.
        path (str): Path that ends in w_qkv or w_gate_hidden.
        kv_heads (int): Number of key-value heads, for w_qkv.
        layout (RowLayout): The cell's order of rows; None for its record's.

    Raises ShapeMismatchError if the members do not make up ``out_channels`` rows or take inputs of different sizes, and
    AdapterError if kv_heads is needed and missing or wrong, or such pairs cannot be joined.
    """
    _check_can_be_joined(adapter, path)
    layout = layout or names.joined_cell(path).layout
    members = names.joined_parts(path)
    present = [member for member in members if (member, "A") in adapter.tensors]
    rows = _member_rows(adapter, path, layout, present, out_channels)
    groups = _groups(path, layout, list(rows.values()), kv_heads)
    scale = adapter.scale(present[0])
    _use_one_dtype(adapter, present)
    blocks_a = [adapter.tensors[member, "A"] for member in present]
    if len({a.shape[1] for a in blocks_a}) > 1:
        raise ShapeMismatchError(
            f"{', '.join(present)} take inputs of different sizes, so {path} cannot replace them. Load the adapter "
            "into the model it was trained on."
        )
    columns = _columns(adapter, present, blocks_a, scale)
    rank = max(ranks.stop for ranks in columns.values())
    blocks = {part: _blocks_by_row(adapter, path, rows, part) for part in adapter.variant.row_parts}
    for member in members:
        block = np.zeros((rows[member], rank), adapter.tensors[present[0], "B"].dtype)
        if member in columns:
            block[:, columns[member]] = scaled(adapter.tensors[member, "B"], adapter.scale(member) / scale)
        blocks.setdefault("B", []).append(block)
    growth = rank / adapter.rank(present[0])
    if growth > 1:
        # The trained and the initial half of each member's pair are not the halves of the joined pair.
        adapter.initialization = None
    alpha = adapter.alphas[present[0]] * adapter.alpha_growth(growth)
    for member in present:
        adapter.remove(member)
    adapter.tensors[path, "A"] = np.concatenate(blocks_a)[:rank]
    for part, arrays in blocks.items():
        adapter.tensors[path, part] = join_rows(arrays, groups)
    adapter.alphas[path] = alpha


def split_pairs(
    adapter: Adapter,
    path: str,
    kv_heads: Optional[int] = None,
    head_dim: Optional[int] = None,
    first: Optional[int] = None,
    layout: Optional[RowLayout] = None,
    heads: Optional[int] = None,
) -> None:
    """Replaces the pair of a joined cell in ``adapter`` by pairs of its members: the inverse of join_pairs.

    If each member has its own columns of B, as after join_pairs, it gets these and their rows of A; otherwise all
    members share the whole A. ``first`` is the number of rows of the first member, for DeepSeek's w_qkv_down
    (q_lora_rank); ``heads`` is for w_qkv, whose rows then determine head_dim; the other arguments are as in join_pairs.

    Raises AdapterError if kv_heads, head_dim or first is needed and missing, or does not divide the rows; or if a pair
    of this kind cannot be split.
    """
    _check_can_be_joined(adapter, path)
    layout = layout or names.joined_cell(path).layout
    members = names.joined_parts(path)
    a = adapter.tensors[path, "A"]
    b = adapter.tensors[path, "B"]
    group = layout.sizes(len(b), HeadSizes(heads, kv_heads, head_dim, first))
    if group is None and layout.needs_first:
        raise AdapterError(
            f"{path} joins {', '.join(members)} in {len(b)} rows, but how many are the first one's is not known or not "
            f"possible ({first}). Name the model's folder or YAML (--base), which has its q_lora_rank."
        )
    if group is None:
        raise AdapterError(
            f"{path} joins {', '.join(members)} in {len(b)} rows, which do not match "
            f"{f'{heads} heads and ' if heads else ''}{kv_heads or 'an unknown number of'} key-value heads of "
            f"{f'size {head_dim}' if head_dim else 'unknown size'}. Name the model's folder or YAML (--base, or "
            "--config of base merge); a network says it by n_kv_heads."
        )
    blocks = dict(zip(members, split_rows(b, group)))
    by_row = {
        part: dict(zip(members, split_rows(adapter.tensors[path, part], group))) for part in adapter.variant.row_parts
    }
    # A shared A stays whole.
    columns = adapter.variant.own_pair and _own_columns(blocks) or {member: slice(0, len(a)) for member in members}
    alpha = adapter.alphas.get(path)
    adapter.remove(path)
    for member, ranks in columns.items():
        adapter.tensors[member, "A"] = np.ascontiguousarray(a[ranks])
        adapter.tensors[member, "B"] = np.ascontiguousarray(blocks[member][:, ranks])
        for part, split in by_row.items():
            adapter.tensors[member, part] = np.ascontiguousarray(split[member])
        if alpha is not None:
            adapter.alphas[member] = alpha * adapter.alpha_growth(adapter.rank(member) / len(a))


def member_weights(
    adapter: Adapter, path: str, weight: np.ndarray, kv_heads: Optional[int] = None, layout: Optional[RowLayout] = None
) -> Dict[str, np.ndarray]:
    """Returns the rows [out, in] of each member in the weight of a joined cell, by the member's path.

    The pairs in ``adapter``, at least one, determine the numbers of rows. Arguments and errors are as in join_pairs.
    """
    layout = layout or names.joined_cell(path).layout
    members = names.joined_parts(path)
    present = [member for member in members if (member, "A") in adapter.tensors]
    rows = _member_rows(adapter, path, layout, present, len(weight))
    groups = _groups(path, layout, list(rows.values()), kv_heads)
    return dict(zip(members, split_rows(weight, [count // groups for count in rows.values()])))


def joined_weight(
    path: str, weights: Sequence[np.ndarray], kv_heads: Optional[int] = None, layout: Optional[RowLayout] = None
) -> np.ndarray:
    """Returns the weight of the joined cell at ``path`` from its members' weights: the inverse of member_weights.

    ``layout`` is the cell's order of rows; None for its record's. Raises AdapterError if kv_heads is needed
    and missing, or does not divide the rows.
    """
    layout = layout or names.joined_cell(path).layout
    return join_rows(weights, _groups(path, layout, list(map(len, weights)), kv_heads))


def _check_can_be_joined(adapter: Adapter, path: str) -> None:
    variant = adapter.variant
    if variant.cannot_join:
        raise AdapterError(
            f"{path} joins {', '.join(names.joined_parts(path))}, and {variant.cannot_join}: such pairs can be neither "
            "joined nor split. Build the model with qkv_concat as it was trained."
        )


def _member_rows(
    adapter: Adapter, path: str, layout: RowLayout, present: List[str], out_channels: int
) -> Dict[str, int]:
    """Returns the number of rows of each member; a member without a pair gets the remaining rows."""
    rows = {member: len(adapter.tensors[member, "B"]) for member in present}
    members = names.joined_parts(path)
    complete = layout.complete([rows.get(member) for member in members], out_channels)
    if complete is None:
        raise ShapeMismatchError(
            f"{path} has {out_channels} rows and cannot be made of the adapter's "
            f"{', '.join(f'{member} with {rows[member]}' for member in present)}. Load the adapter into the model it "
            "was trained on."
        )
    return dict(zip(members, complete))


def _groups(path: str, layout: RowLayout, rows: Sequence[int], kv_heads: Optional[int]) -> int:
    groups = layout.groups(rows, kv_heads)
    if groups is None:
        raise AdapterError(
            f"{path} orders its rows by key-value head, but {kv_heads or 'an unknown number of'} "
            f"heads do not divide the {', '.join(map(str, rows))} rows of q, k, v evenly. Name the model's folder or "
            "YAML (--base, or --config of base merge); a network says it by n_kv_heads."
        )
    return groups


def _use_one_dtype(adapter: Adapter, members: List[str]) -> None:
    """Converts the pairs to float32, which holds float16 and bfloat16 exactly, if they have more than one dtype."""
    if len({adapter.tensors[member, half].dtype for member in members for half in "AB"}) > 1:
        for member in members:
            for part, array in adapter.parts(member).items():
                adapter.tensors[member, part] = to_float32(array)


def _blocks_by_row(adapter: Adapter, path: str, rows: Dict[str, int], part: str) -> List[np.ndarray]:
    """Returns a part of each member that has an element or a row per row of the weight, such as the magnitude."""
    variant = adapter.variant
    present = [adapter.tensors[member, part] for member in rows if (member, part) in adapter.tensors]
    lacking = [member for member in rows if (member, part) not in adapter.tensors]
    if lacking and part == variant.row_norms:
        raise AdapterError(
            f"{path} joins {', '.join(rows)}, but the {variant.name} adapter has no pair for {', '.join(lacking)}: "
            f"the {variant.tensors} of those rows are known only from the base. Build the model with qkv_concat: False."
        )
    blocks = []
    for member, count in rows.items():
        zeros = np.zeros((count, *present[0].shape[1:]), present[0].dtype)
        blocks.append(adapter.tensors.get((member, part), zeros))
    return blocks


def _columns(adapter: Adapter, present: List[str], blocks_a: List[np.ndarray], scale: float) -> Dict[str, slice]:
    """Returns the columns of the joined B that each member fills: the same with a shared A, otherwise separate ones."""
    shared = all(a.tobytes() == blocks_a[0].tobytes() for a in blocks_a)
    if shared and all(adapter.scale(member) == scale for member in present):
        return dict.fromkeys(present, slice(0, len(blocks_a[0])))
    ends = np.cumsum([len(a) for a in blocks_a])
    return {member: slice(int(end) - len(a), int(end)) for member, a, end in zip(present, blocks_a, ends)}


def _own_columns(blocks: Dict[str, np.ndarray]) -> Dict[str, slice]:
    """Returns each member's own columns of B, or {} if members share columns or leave some out."""
    columns = {}
    begin = 0
    for member, block in blocks.items():
        used = np.flatnonzero((to_float32(block) != 0).any(axis=0))
        if used.size:
            if used[0] != begin or used[-1] != begin + used.size - 1:
                return {}
            columns[member] = slice(begin, begin + used.size)
            begin += used.size
    return columns if begin == block.shape[1] else {}
