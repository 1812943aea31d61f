"""Tensors of qkv_concat out of a base checkpoint's separate ones, and the reverse, a range of rows at a time.

A concatenated tensor is made of groups: for w_qkv one for each key-value head, [rows of q | of k | of v], for
w_gate_hidden one for each row of w1, [row of w1 | row of w3].
"""

from typing import List, Optional, Tuple

from mindlora.base.reader import BaseCheckpoint
from mindlora.base.writer import OutputTensor
from mindlora.errors import CheckpointError
from mindlora.models import joined_rows, names


def parts_of(name: str) -> List[str]:
    """Returns the parameters that a concatenated one stands for, or [] for any other; all under MindFormers' names."""
    path, _, leaf = name.rpartition(".")
    return [f"{part}.{leaf}" for part in names.joined_parts(path)] if leaf in ("weight", "bias") else []


def whole_of(name: str) -> Optional[str]:
    """Returns the concatenated parameter of which ``name`` is a part, or None; both under MindFormers' names."""
    path, _, leaf = name.rpartition(".")
    parent = path.rpartition(".")[0]
    wholes = (f"{parent}.{joint}.{leaf}" for joint in names.JOINED)
    return next((whole for whole in wholes if name in parts_of(whole)), None)


def joined(base: BaseCheckpoint, whole: str, parts: List[str], kv_heads: Optional[int]) -> OutputTensor:
    """Returns the concatenated tensor ``whole`` made of the tensors ``parts`` of ``base``.

    Raises:
        CheckpointError: They do not fit together, or the number of key-value heads does not fit or is not known.
    """
    infos = [base.tensors[part] for part in parts]
    if len({(info.dtype, info.shape[1:]) for info in infos}) > 1:
        raise CheckpointError(
            f"{', '.join(parts)} differ in dtype or width, so they cannot be joined: "
            f"{', '.join(str(list(info.shape)) for info in infos)}."
        )
    counts = [info.shape[0] for info in infos]
    if len(parts) == 2:
        groups, fits = counts[0], counts[0] == counts[1]
    else:
        groups = _known(whole, kv_heads)
        fits = counts[1] == counts[2] and not any(count % groups for count in counts)
    if not fits:
        raise CheckpointError(
            f"{' and '.join(map(str, counts))} rows of {', '.join(parts)} do not make up {whole}"
            + (f" with {groups} key-value heads." if len(parts) == 3 else ".")
        )
    sizes = [count // groups for count in counts]

    def rows(begin, end):
        begin, end = begin // sum(sizes), end // sum(sizes)
        read = [base.read_rows(part, begin * size, end * size) for part, size in zip(parts, sizes)]
        return joined_rows.join_gate_rows(*read) if len(read) == 2 else joined_rows.join_qkv_rows(*read, end - begin)

    return OutputTensor(whole, infos[0].dtype, (sum(counts),) + infos[0].shape[1:], rows, sum(sizes))


def split(
    base: BaseCheckpoint, whole: str, targets: List[str], heads: Optional[int], kv_heads: Optional[int]
) -> List[OutputTensor]:
    """Returns the tensors ``targets`` that the concatenated tensor ``whole`` of ``base`` stands for.

    Raises:
        CheckpointError: The rows are not those of so many heads, or how many there are is not known.
    """
    info = base.tensors[whole]
    groups, sizes = _groups_in(whole, info.shape[0], len(targets), heads, kv_heads)

    def rows(part, begin, end):
        begin, end = begin // sizes[part], end // sizes[part]
        read = base.read_rows(whole, begin * sum(sizes), end * sum(sizes))
        return (
            joined_rows.split_gate_rows(read)
            if len(sizes) == 2
            else joined_rows.split_qkv_rows(read, end - begin, sizes[1])
        )[part]

    return [
        OutputTensor(
            target,
            info.dtype,
            (groups * size,) + info.shape[1:],
            lambda begin, end, part=part: rows(part, begin, end),
            size,
        )
        for part, (target, size) in enumerate(zip(targets, sizes))
    ]


def _groups_in(whole, count, parts, heads, kv_heads) -> Tuple[int, List[int]]:
    """Returns the number of groups, and the rows of each part in one."""
    if parts == 2:
        if count % 2:
            raise CheckpointError(f"{whole} has {count} rows, which cannot be those of w1 and w3 in turn.")
        return count // 2, [1, 1]
    heads, kv_heads = _known(whole, heads), _known(whole, kv_heads)
    if heads % kv_heads or count % (heads + 2 * kv_heads):
        raise CheckpointError(
            f"{whole} has {count} rows, which cannot be those of {heads} heads and {kv_heads} "
            "key-value heads. Give the model's --heads and --kv-heads."
        )
    size = count // (heads + 2 * kv_heads)
    return kv_heads, [heads // kv_heads * size, size, size]


def _known(whole, heads) -> int:
    if not heads or heads < 1:
        raise CheckpointError(
            f"{whole} keeps its rows by key-value head, and how many heads there are is not known. "
            "Give --heads and --kv-heads: num_heads and n_kv_heads of the model."
        )
    return heads
