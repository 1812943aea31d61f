"""A quantized base under Hugging Face's names, its joined weights taken apart: what they decode to stays the same."""

from typing import Iterable, List, Mapping, Tuple

import numpy as np

from mindlora.core.numerics.nf4 import GROUP, by_row, split_name, tensor_name
from mindlora.files.base import experts
from mindlora.files.base.joined import split
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.files.base.renaming import tensor_of
from mindlora.files.base.writer import OutputTensor
from mindlora.models import names
from mindlora.models.architectures.architecture import HF, LEGACY
from mindlora.models.architectures.joined_rows import HeadSizes

_OF_GROUPS = tuple(tensor_name("", field) for field in ("scales", "offsets"))
_ABSMAX = tensor_name("", "absmax")


def quantized_weights(tensor_names: Iterable[str]) -> List[str]:
    """Returns the names of the weights that are 4-bit, given the names of a checkpoint's tensors."""
    return [name[: -len(_ABSMAX)] for name in tensor_names if name.endswith(_ABSMAX)]


def with_smaller_groups(shapes: Mapping[str, Tuple[int, ...]]) -> List[str]:
    """Returns the names of 4-bit weights with groups of fewer than 256 blocks, which operators of a CPU alone decode.

    ``shapes`` is name -> shape of a checkpoint's tensors.
    """
    smaller = []
    for weight in quantized_weights(shapes):
        rows, blocks = shapes[tensor_name(weight, "absmax")]
        if shapes[tensor_name(weight, "scales")] != (-(-rows * blocks // GROUP),):
            smaller.append(weight)
    return smaller


def taken_apart(base: BaseCheckpoint, heads: int, kv_heads: int) -> List[OutputTensor]:
    """Returns the tensors of a quantized ``base`` of MindFormers under Hugging Face's names.

    Groups of blocks cross rows. Where rows are taken out of a joined weight, its groups become smaller ones that do not
    (nf4.by_row). The stacked weights of experts stay [experts * in, blocks * 32], as mcore has them, if they are
    quantized; else they are those of single experts.
    """
    tensors = []
    for name in base.tensors:
        tensors += _made_of(base, name, HeadSizes(heads, kv_heads))
    return tensors


def _made_of(base: BaseCheckpoint, name: str, sizes: HeadSizes) -> List[OutputTensor]:
    weight, field = split_name(name)
    expert = experts.expert_tensor(base, weight)
    if expert and f"{weight}{_ABSMAX}" not in base.tensors:
        return experts.to_hugging_face(base, name, expert)
    if expert:
        return [tensor_of(base, name)._replace(name=f"{names.to_hugging_face(weight)}{field}")]
    path, _, leaf = weight.rpartition(".")
    legacy = base.architecture.rename_path(path, base.world, LEGACY) or path
    if names.in_hugging_face(legacy):
        renamed = base.architecture.rename_parameter(weight, base.world, HF) or names.parameter_to_hugging_face(weight)
        return [tensor_of(base, name)._replace(name=f"{renamed or weight}{field}")]
    targets = [f"{names.to_hugging_face(part)}.{leaf}{field}" for part in names.joined_parts(legacy)]
    joined = f"{legacy}.{leaf}"
    if field not in _OF_GROUPS:
        return split(tensor_of(base, name), joined, targets, sizes)
    rows, blocks = base.tensors[f"{weight}{_ABSMAX}"].shape
    return [_flat(part) for part in split(_by_row(base, name, rows, blocks), joined, targets, sizes)]


def _by_row(base: BaseCheckpoint, name: str, rows: int, blocks: int) -> OutputTensor:
    """Returns the scales or offsets of a weight by its rows."""
    whole = by_row(base.read_rows(name, 0, base.tensors[name].shape[0]), rows, blocks)
    return OutputTensor(name, whole.dtype, whole.shape, lambda begin, end: whole[begin:end])


def _flat(part: OutputTensor) -> OutputTensor:
    rows, columns = part.shape

    def flat(begin: int, end: int) -> np.ndarray:
        return part.rows(begin // columns, end // columns).reshape(-1)

    return part._replace(shape=(rows * columns,), rows=flat, unit=part.unit * columns)
