"""Joins a checkpoint's tensors (MindFormers' qkv_concat) and stacks its experts, and splits them again.

Both directions of a joined tensor read a range of rows at a time: whole groups, as
mindlora.models.architectures.joined_rows defines them.

Hugging Face's checkpoints have gate_proj [inner, hidden], up_proj and down_proj [hidden, inner] of each expert, or
gate_up_proj [experts, 2 inner, hidden] and down_proj [experts, hidden, inner] for all. mcore has weight1
[experts * hidden, 2 inner] and weight2 [experts * inner, hidden]: each expert's matrix transposed.
"""

import functools
import re
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.text import examples
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.files.base.writer import OutputTensor
from mindlora.models import names
from mindlora.models.architectures.architecture import HF, MCORE, Experts, JoinedCell
from mindlora.models.architectures.joined_rows import HeadSizes, join_rows, split_rows

_HEADS_ADVICE = (
    "Put the model's config.json beside the tensors, or name its folder or YAML (--config, of base convert and merge)."
)
_SINGLE = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight$")


def parts_of(name: str) -> List[str]:
    """Returns the parameters that a joined one replaces, or [] for other parameters; all under MindFormers' names."""
    path, _, leaf = name.rpartition(".")
    return [f"{part}.{leaf}" for part in names.joined_parts(path)] if leaf in ("weight", "bias") else []


def joined_name(name: str) -> Optional[str]:
    """Returns the joined parameter that ``name`` is a part of, or None; both under MindFormers' names."""
    path, _, leaf = name.rpartition(".")
    joined = names.joined_path(path) if leaf in ("weight", "bias") else None
    return joined and f"{joined}.{leaf}"


def join(joined: str, tensors: List[OutputTensor], kv_heads: Optional[int]) -> OutputTensor:
    """Returns the tensor ``joined`` made of the tensors of its parts, in the order of their rows.

    Raises CheckpointError if they cannot be joined, or kv_heads (for w_qkv) is wrong or unknown.
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


def add_joined(names_: Iterable[str], tensors: Dict[str, OutputTensor], kv_heads: Optional[int]) -> None:
    """Adds, in place, the joined tensors of ``names_`` (MindFormers' names) that a checkpoint holds apart."""
    for name in set(names_) - set(tensors):
        parts = parts_of(name)
        if parts and all(part in tensors for part in parts):
            tensors[name] = join(name, [tensors[part] for part in parts], kv_heads)


def split(tensor: OutputTensor, joined: str, targets: List[str], model: HeadSizes) -> List[OutputTensor]:
    """Returns the tensors ``targets``, in the order of their rows, that a joined one is divided into.

    ``joined`` is MindFormers' name. Raises CheckpointError if the rows do not match the numbers of
    heads, or these are needed but unknown.
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
            f"The rows of {joined} are ordered by key-value head, but the number of heads is not known. {_HEADS_ADVICE}"
        )


class ExpertTensor(NamedTuple):
    """A tensor that holds weights of experts.

    Attributes:
        stack (Experts): The record of the stacked weight that contains it.
        holder (str): The path before the weight's name, such as model.layers.0.mlp.experts.
        expert (int): Its expert, or None for a stacked weight.
        part (str): The cell of that expert, such as up_proj; "" for a stacked weight.
    """

    stack: Experts
    holder: str
    expert: Optional[int]
    part: str


def expert_tensor(base: BaseCheckpoint, name: str) -> Optional[ExpertTensor]:
    """Returns the description of the tensor ``name`` of ``base``, or None if it does not belong to routed experts."""
    stacks = base.architecture.experts
    match = _SINGLE.match(name) if base.world == HF else None
    if match:
        stack = next((stack for stack in stacks if match[3] in stack.parts), None)
        return stack and ExpertTensor(stack, match[1], int(match[2]), match[3])
    holder, _, leaf = name.rpartition(".")
    whole = next((stack for stack in stacks if stack.names.leaves.under(base.world) == leaf), None)
    is_expert = whole and ("." + name).endswith("." + whole.names.under(base.world))
    return ExpertTensor(whole, holder, None, "") if whole and is_expert else None


def experts_to_mcore(base: BaseCheckpoint, name: str, own: ExpertTensor) -> List[OutputTensor]:
    """Returns the tensors written for Hugging Face's ``name``: the stacked weight, in the place of its first part.

    Raises CheckpointError if some experts are missing, or their tensors differ in shape or dtype.
    """
    if own.expert is None:
        parts = [[name]]
    elif own.expert or own.part != own.stack.parts[0]:
        return []
    else:
        parts = _parts_of_stacks(base, own)
    info = base.tensors[parts[0][0]]
    wrong = [one for tensors in parts for one in tensors if one in base.tensors and base.tensors[one][:2] != info[:2]]
    missing = [one for tensors in parts for one in tensors if one not in base.tensors]
    if missing or wrong:
        raise CheckpointError(
            f"{base.path} holds {name}, and {'lacks' if missing else 'another shape or dtype of'} "
            f"{examples(missing or wrong)}, which are stacked with it. Copy the model again."
        )
    rows, columns = info.shape[-2:]
    width = rows * len(parts[0])
    experts = len(parts) if own.expert is not None else info.shape[0]
    target = base.architecture.in_layers(f"{own.holder}.{own.stack.names.leaves.mcore}", HF, MCORE)

    def stacked(begin: int, end: int) -> np.ndarray:
        blocks = []
        for expert in range(begin // columns, end // columns):
            if own.expert is None:
                matrix = base.read_rows(name, expert, expert + 1)[0]
            else:
                matrix = np.concatenate([base.read_rows(part, 0, rows) for part in parts[expert]])
            blocks.append(matrix.T)
        return np.ascontiguousarray(np.concatenate(blocks))

    return [OutputTensor(target, info.dtype, (experts * columns, width), stacked, columns)]


def experts_to_hugging_face(base: BaseCheckpoint, name: str, own: ExpertTensor) -> List[OutputTensor]:
    """Returns the tensors of single experts written for mcore's stacked weight ``name``.

    Raises CheckpointError if the number of experts, known from the router's weight, does not divide its rows.
    """
    info = base.tensors[name]
    router = f"{own.holder.rpartition('.')[0]}.router.weight"
    experts = base.tensors[router].shape[0] if router in base.tensors else 0
    if not experts or info.shape[0] % experts or info.shape[1] % len(own.stack.parts):
        raise CheckpointError(
            f"{name} is {list(info.shape)}, and {router} of {base.path} says that there are {experts} experts. Copy "
            "the model again."
        )
    columns = info.shape[0] // experts
    rows = info.shape[1] // len(own.stack.parts)
    holder = base.architecture.in_layers(own.holder, MCORE, HF)

    def matrix(expert: int, first: int, begin: int, end: int) -> np.ndarray:
        block = base.read_rows(name, expert * columns, (expert + 1) * columns)
        return np.ascontiguousarray(block[:, first + begin : first + end].T)

    return [
        OutputTensor(
            f"{holder}.{expert}.{part}.weight",
            info.dtype,
            (rows, columns),
            functools.partial(matrix, expert, index * rows),
            rows,
        )
        for expert in range(experts)
        for index, part in enumerate(own.stack.parts)
    ]


def _parts_of_stacks(base: BaseCheckpoint, own: ExpertTensor) -> List[List[str]]:
    """Returns, for each expert, the names of the tensors that are stacked with the first one."""
    singles = filter(None, map(_SINGLE.match, base.tensors))
    experts = 1 + max(int(single[2]) for single in singles if single[1] == own.holder)
    parts = []
    for expert in range(experts):
        parts.append([f"{own.holder}.{expert}.{part}.weight" for part in own.stack.parts])
    return parts


def stack_experts(tensors: List[OutputTensor], stacks: Sequence[Experts]) -> List[OutputTensor]:
    """Returns the tensors with single experts' (Hugging Face's names) stacked: [experts, out, in].

    Raises CheckpointError if some experts are missing.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    others = []
    made: Dict[str, OutputTensor] = {}
    for name in by_name:
        match = _SINGLE.match(name)
        stack = match and next((stack for stack in stacks if match[3] in stack.parts), None)
        if match is None or stack is None:
            others.append(by_name[name])
            continue
        target = f"{match[1]}.{stack.names.leaves.hf}"
        if target not in made:
            made[target] = _stack(target, match[1], stack.parts, by_name)
    return [*others, *made.values()]


def _stack(target: str, holder: str, kinds: Sequence[str], tensors: Mapping[str, OutputTensor]) -> OutputTensor:
    """Returns the tensor ``target`` of all experts, whose matrices join those of ``kinds`` one after the other."""
    singles = filter(None, map(_SINGLE.match, tensors))
    count = 1 + max(int(single[2]) for single in singles if single[1] == holder)
    parts = []
    for expert in range(count):
        parts.append([f"{holder}.{expert}.{kind}.weight" for kind in kinds])
    missing = [name for group in parts for name in group if name not in tensors]
    if missing:
        raise CheckpointError(f"The checkpoint lacks {examples(missing)}, of which {target} is made. Copy it again.")
    first = [tensors[name] for name in parts[0]]
    heights = [tensor.shape[0] for tensor in first]

    def rows(begin: int, end: int) -> np.ndarray:
        matrices = []
        for group in parts[begin:end]:
            blocks = [tensors[name].rows(0, height) for name, height in zip(group, heights)]
            matrices.append(np.concatenate(blocks))
        return np.stack(matrices)

    return OutputTensor(target, first[0].dtype, (count, sum(heights), first[0].shape[1]), rows)
