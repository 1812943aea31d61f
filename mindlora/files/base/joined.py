"""Makes joined tensors (MindFormers' qkv_concat) from a base checkpoint's separate ones, and the reverse.

Both directions read a range of rows at a time: whole groups, as mindlora.models.architectures.joined_rows defines them.
"""

import functools
from typing import List, Optional, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.files.base.writer import OutputTensor
from mindlora.models import names
from mindlora.models.architectures.architecture import JoinedCell
from mindlora.models.architectures.joined_rows import HeadSizes, join_rows, split_rows

_HEADS_ADVICE = (
    "Put the model's config.json beside the tensors, or name its folder or YAML (--config, of base convert and merge)."
)


def parts_of(name: str) -> List[str]:
    """Returns the parameters that a joined one replaces, or [] for any other; all under MindFormers' names."""
    path, _, leaf = name.rpartition(".")
    return [f"{part}.{leaf}" for part in names.joined_parts(path)] if leaf in ("weight", "bias") else []


def joined_name(name: str) -> Optional[str]:
    """Returns the joined parameter that ``name`` is a part of, or None; both under MindFormers' names."""
    path, _, leaf = name.rpartition(".")
    joined = names.joined_path(path) if leaf in ("weight", "bias") else None
    return joined and f"{joined}.{leaf}"


def join(joined: str, tensors: List[OutputTensor], kv_heads: Optional[int]) -> OutputTensor:
    """Returns the tensor ``joined`` made of the tensors of its parts, in the order of their rows.

    Raises CheckpointError if they cannot be joined, or kv_heads (for w_qkv) is wrong or not known.
    """
    parts = [tensor.name for tensor in tensors]
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1:
        raise CheckpointError(
            f"{', '.join(parts)} differ in dtype or width, so they cannot be joined: "
            f"{', '.join(str(list(tensor.shape)) for tensor in tensors)}. Save the checkpoint again with all alike."
        )
    layout = _cell(joined).layout
    counts = [tensor.shape[0] for tensor in tensors]
    groups = layout.groups(counts, kv_heads)
    if groups is None and layout.needs_heads:
        _check_heads(joined, kv_heads)
    if groups is None:
        heads = f" with {kv_heads} key-value heads" if layout.needs_heads else ""
        advice = _HEADS_ADVICE if layout.needs_heads else "Copy the checkpoint again."
        raise CheckpointError(
            f"{' and '.join(map(str, counts))} rows of {', '.join(parts)} cannot be joined into {joined}{heads}. "
            f"{advice}"
        )
    sizes = [count // groups for count in counts]
    unit = sum(sizes)

    def rows(begin: int, end: int) -> np.ndarray:
        begin //= unit
        end //= unit
        read = [tensor.rows(begin * size, end * size) for tensor, size in zip(tensors, sizes)]
        return join_rows(read, end - begin)

    return OutputTensor(joined, tensors[0].dtype, (sum(counts),) + tensors[0].shape[1:], rows, unit)


def split(tensor: OutputTensor, joined: str, targets: List[str], model: HeadSizes) -> List[OutputTensor]:
    """Returns the tensors ``targets``, in the order of their rows, that a joined one is divided into.

    ``joined`` is its name under MindFormers' names. Raises CheckpointError if the rows do not match the numbers of
    heads, or these are needed but not known.
    """
    sizes = _group_sizes(tensor.name, _cell(joined), tensor.shape[0], model)
    groups = tensor.shape[0] // sum(sizes)

    def read(part: int, begin: int, end: int) -> np.ndarray:
        begin //= sizes[part]
        end //= sizes[part]
        return split_rows(tensor.rows(begin * sum(sizes), end * sum(sizes)), sizes)[part]

    return [
        OutputTensor(target, tensor.dtype, (groups * size,) + tensor.shape[1:], functools.partial(read, part), size)
        for part, (target, size) in enumerate(zip(targets, sizes))
    ]


def _group_sizes(name: str, cell: JoinedCell, count: int, model: HeadSizes) -> Tuple[int, ...]:
    """Returns the rows of each part in one group of a joined tensor with ``count`` rows."""
    if cell.layout.needs_heads:
        _check_heads(name, model.heads)
        _check_heads(name, model.kv_heads)
    sizes = cell.layout.sizes(count, model)
    if sizes is None and cell.layout.needs_heads:
        raise CheckpointError(
            f"{name} has {count} rows, which cannot be those of {model.heads} heads and {model.kv_heads} "
            f"key-value heads. {_HEADS_ADVICE}"
        )
    if sizes is None:
        raise CheckpointError(
            f"{name} has {count} rows, which cannot be split into those of {' and '.join(cell.parts)}. Copy the "
            "checkpoint again."
        )
    return sizes


def _cell(joined: str) -> JoinedCell:
    return names.joined_cell(joined.rpartition(".")[0])


def _check_heads(joined, heads):
    if not heads or heads < 1:
        raise CheckpointError(
            f"The rows of {joined} are ordered by key-value head, and the number of heads is not known. {_HEADS_ADVICE}"
        )
