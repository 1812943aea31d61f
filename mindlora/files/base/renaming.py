"""Renames the tensors of a checkpoint, joining or splitting them where needed, quantized ones included."""

import functools
import itertools
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.nf4 import GROUP, by_row, split_name, tensor_name
from mindlora.core.text import examples
from mindlora.files.base.joined import (
    ExpertTensor,
    expert_tensor,
    experts_to_hugging_face,
    experts_to_mcore,
    join,
    joined_name,
    parts_of,
    split,
)
from mindlora.files.base.reader import WORLDS, BaseCheckpoint
from mindlora.files.base.writer import OutputTensor, Shard
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import HF, LEGACY, MCORE
from mindlora.models.architectures.joined_rows import HeadSizes

_OF_GROUPS = tuple(tensor_name("", field) for field in ("scales", "offsets"))
_ABSMAX = tensor_name("", "absmax")


class Plan:
    """The tensors to write: a Shard for each file of ``base``, and the names that are left out.

    Args:
        base (BaseCheckpoint): The checkpoint, open until the tensors are written.
        to (str): "hf", "mindformers" or "mcore".
        concat (bool): Whether to join w_qkv and w_gate_hidden, for "mindformers"; mcore always joins.
        heads, kv_heads (int): Numbers of attention and of key-value heads; None takes them from base.config.

    ``skipped`` are the tensors that every model computes itself. Raises CheckpointError if a name or a number of
    heads is unknown, or parts of a joined tensor are missing.
    """

    def __init__(self, base: BaseCheckpoint, to: str, concat: bool, heads: Optional[int], kv_heads: Optional[int]):
        self.base = base
        self._to = to
        heads = heads or base.config.get("num_attention_heads")
        kv_heads = kv_heads or base.config.get("num_key_value_heads") or heads
        self._sizes = HeadSizes(heads, kv_heads, first=_latent_rows(base))
        # Old checkpoints hold tables that every model computes itself.
        self.skipped = [name for name in base.tensors if names.is_computed(name)]
        self._joins = concat or to == MCORE
        # Legacy name -> name in base: joined tensors and their parts are known by legacy names.
        self._own: Dict[str, str] = {}
        for name in base.tensors:
            legacy = name if base.world == LEGACY or self._expert(name) else self._renamed(name, base.world, LEGACY)
            if legacy:
                self._own[legacy] = name
        self._legacy = {name: legacy for legacy, name in self._own.items()}
        self._check_known()
        self.shards = []
        for file, tensor_names in base.names_by_file.items():
            made = [self._made_of(name) for name in tensor_names if name not in self.skipped]
            self.shards.append(Shard(list(itertools.chain.from_iterable(made)), base.files[file].metadata))

    def _renamed(self, name: str, source: str, target: str) -> Optional[str]:
        """Returns a name in another world, looking it up in the checkpoint's record first."""
        renamed = self.base.architecture.rename_parameter(name, source, target)
        by_world = {
            HF: names.parameter_to_hugging_face,
            LEGACY: names.parameter_to_mindformers,
            MCORE: names.parameter_to_mcore,
        }
        return renamed or by_world[target](name)

    def _check_known(self) -> None:
        unknown = [
            name
            for name in self.base.tensors
            if name not in self.skipped
            and not self._expert(name)
            and not self._renamed(name, self.base.world, self._to)
            and not self._joined_of(name)
            and not self._parts_of(name)
        ]
        if unknown:
            raise CheckpointError(
                f"{self.base.path} holds tensors for which {WORLDS[self._to]} name is not known: {examples(unknown)}. "
                f"Give a checkpoint of {registry.titles()}, without LoRA, quantization and the state of an optimizer."
            )

    def _made_of(self, name: str) -> List[OutputTensor]:
        """Returns the tensors written in place of ``name``."""
        if self._to == self.base.world:
            return [tensor_of(self.base, name)]
        expert = self._expert(name)
        joined = self._joined_of(name)
        parts = self._parts_of(name)
        if expert:
            make = experts_to_mcore if self._to == MCORE else experts_to_hugging_face
            return make(self.base, name, expert)
        if joined:
            return self._joined_at(self._legacy[name], joined)
        if parts:
            targets = [self._in_target(part) for part in parts]
            return split(tensor_of(self.base, name), self._legacy[name], targets, self._sizes)
        target = self._renamed(name, self.base.world, self._to) or name
        return [tensor_of(self.base, name)._replace(name=target)]

    def _expert(self, name: str) -> Optional[ExpertTensor]:
        if LEGACY in (self.base.world, self._to):
            return None
        return expert_tensor(self.base, name)

    def _joined_of(self, name: str) -> Optional[str]:
        """Returns the joined tensor (its legacy name) of which ``name`` becomes a part, or None."""
        joined = joined_name(self._legacy.get(name, ""))
        if joined is None or self._to == HF and names.in_hugging_face(self._legacy[name].rpartition(".")[0]):
            return None
        return joined if self._joins or self._to == HF else None

    def _parts_of(self, name: str) -> List[str]:
        """Returns the tensors (their legacy names) into which ``name`` is split, or [] if it stays in one piece."""
        legacy = self._legacy.get(name, "")
        splits = self._to == HF and not names.in_hugging_face(legacy.rpartition(".")[0])
        return parts_of(legacy) if splits else []

    def _in_target(self, legacy: str) -> str:
        return (legacy if self._to == LEGACY else self._renamed(legacy, LEGACY, self._to)) or legacy

    def _joined_at(self, legacy: str, joined: str) -> List[OutputTensor]:
        parts = parts_of(joined)
        missing = [part for part in parts if part not in self._own]
        if missing:
            advice = ", or leave --concat out" if self._to == LEGACY else ""
            raise CheckpointError(
                f"{self.base.path} holds {self._own[legacy]} and nothing for {', '.join(missing)}, so {joined} cannot "
                f"be made. Copy the model again{advice}."
            )
        # The joined tensor goes where its first part was.
        if legacy != parts[0]:
            return []
        made = join(joined, [tensor_of(self.base, self._own[part]) for part in parts], self._sizes.kv_heads)
        return [made._replace(name=self._in_target(joined))]


def tensor_of(base: BaseCheckpoint, name: str) -> OutputTensor:
    """Returns a tensor of ``base`` unchanged."""
    info = base.tensors[name]
    return OutputTensor(name, info.dtype, info.shape, functools.partial(base.read_rows, name))


def _latent_rows(base: BaseCheckpoint) -> Optional[int]:
    """Returns the rows of DeepSeek's q_a_proj, which are the columns of linear_qb, or None for another model."""
    sizes = (info.shape[1] for name, info in base.tensors.items() if name.endswith(".linear_qb.weight"))
    return next(sizes, None)


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

    Groups of blocks cross rows. Taking rows out of a joined weight turns its groups into smaller ones that do not
    (nf4.by_row). The stacked weights of experts stay [experts * in, blocks * 32], as in mcore, if they are
    quantized; otherwise they are split into single experts.
    """
    tensors = []
    for name in base.tensors:
        tensors += _made_of(base, name, HeadSizes(heads, kv_heads))
    return tensors


def _made_of(base: BaseCheckpoint, name: str, sizes: HeadSizes) -> List[OutputTensor]:
    weight, field = split_name(name)
    expert = expert_tensor(base, weight)
    if expert and f"{weight}{_ABSMAX}" not in base.tensors:
        return experts_to_hugging_face(base, name, expert)
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
    """Returns the scales or offsets of a weight, row by row."""
    whole = by_row(base.read_rows(name, 0, base.tensors[name].shape[0]), rows, blocks)
    return OutputTensor(name, whole.dtype, whole.shape, lambda begin, end: whole[begin:end])


def _flat(part: OutputTensor) -> OutputTensor:
    rows, columns = part.shape

    def flat(begin: int, end: int) -> np.ndarray:
        return part.rows(begin // columns, end // columns).reshape(-1)

    return part._replace(shape=(rows * columns,), rows=flat, unit=part.unit * columns)
