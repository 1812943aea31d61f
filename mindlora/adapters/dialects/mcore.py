"""What MindFormers' own LoRA on its mcore models reads: one rank and one scale for all cells, and their joined names.

The pairs have zeros up to the largest rank, so that BA stays the same. mindlora takes them off again when it reads.
"""

import dataclasses
from typing import Dict

import numpy as np

from mindlora.adapters import metadata as adapter_metadata
from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects.dialect import File, write_file
from mindlora.adapters.dialects.mindformers import MCORE, MindFormers, tensor_key
from mindlora.common.text import listed
from mindlora.errors import AdapterError
from mindlora.models import architecture, names, registry
from mindlora.numerics.dtypes import scaled, to_float32


class Mcore(MindFormers):
    """A file under mcore's names, with one rank and one scale."""

    form = "mcore"
    ending = ".safetensors"
    world = architecture.MCORE

    def __init__(self) -> None:
        super().__init__(MCORE)

    def read(self, file: File) -> Adapter:
        adapter = super().read(file)
        # Only mindlora adds zeros, and its files state lora_alpha.
        if file.metadata.get("alphas"):
            without_zeros(adapter)
        return adapter

    def write(self, adapter: Adapter, path: str) -> None:
        self.refuse_single_experts(adapter)
        adapter = one_rank(adapter)
        paths = _paths(adapter)
        tensors = {tensor_key(paths[cell], part, MCORE): array for (cell, part), array in adapter.tensors.items()}
        write_file(path, tensors, adapter_metadata.header(adapter))


def _paths(adapter: Adapter) -> Dict[str, str]:
    """Returns path -> path in mcore; raises AdapterError for what MindFormers' own LoRA does not know."""
    variant = adapter.variant
    if not variant.is_plain:
        raise AdapterError(
            f"MindFormers' mcore models do not read {variant.tensors} ({variant.field}). Merge the adapter into its "
            "base, or write format 'peft'."
        )
    if adapter.saved_modules:
        raise AdapterError(
            "MindFormers' mcore LoRA has no place for saved modules (modules_to_save): "
            f"{', '.join(adapter.saved_modules)}. Merge the adapter into its base, or write format 'peft'."
        )
    # The Llama has the cells of Qwen3 and others, under the same names.
    record = names.architecture_of_cells(adapter.paths) or registry.ARCHITECTURES[0]
    renamed = {}
    unknown = []
    for path in adapter.paths:
        renamed[path] = record.rename_path(path, architecture.LEGACY, architecture.MCORE) or names.to_mcore(path)
        if path in adapter.embeddings or renamed[path] == path or not names.is_linear(path):
            unknown.append(path)
    if unknown:
        raise AdapterError(
            f"MindFormers' mcore models put no LoRA on cells such as {listed(unknown)}. Write format 'peft', which "
            "mindlora loads."
        )
    return renamed


def one_rank(adapter: Adapter) -> Adapter:
    """Returns ``adapter`` with its largest rank in all pairs, by zeros, and one scale, for which B is rescaled."""
    tensors = dict(adapter.tensors)
    largest = max(adapter.paths, key=adapter.rank)
    rank = adapter.rank(largest)
    scale = adapter.scale(largest)
    for path in adapter.paths:
        a = adapter.tensors[path, "A"]
        b = adapter.tensors[path, "B"]
        b = scaled(b, adapter.scale(path) / scale)
        missing = rank - adapter.rank(path)
        tensors[path, "A"] = np.pad(a, ((0, missing), (0, 0)))
        tensors[path, "B"] = np.pad(b, ((0, 0), (0, missing)))
    alphas = dict.fromkeys(adapter.paths, scale * rank)
    return dataclasses.replace(adapter, tensors=tensors, alphas=alphas, use_rslora=False)


def without_zeros(adapter: Adapter) -> None:
    """Takes off what one_rank added: ranks at the end that are zero in A and in B. Such a rank can never train."""
    for path in adapter.paths:
        a = adapter.tensors[path, "A"]
        b = adapter.tensors[path, "B"]
        used = to_float32(a).any(axis=1) | to_float32(b).any(axis=0)
        rank = 1 + int(max(np.flatnonzero(used), default=len(a) - 1))
        if rank < len(a):
            adapter.alphas[path] *= rank / len(a)
            adapter.tensors[path, "A"] = a[:rank].copy()
            adapter.tensors[path, "B"] = b[:, :rank].copy()
