"""The form that MindFormers' own LoRA on mcore models reads: joined cells, and one rank and scale for all.

Zeros fill the pairs up to the largest rank, which keeps B A the same. mindlora removes them when it reads.
"""

import dataclasses
from typing import Dict, Iterable, NoReturn

from mindlora.core.errors import AdapterError
from mindlora.core.numerics.dtypes import scaled
from mindlora.core.text import listed
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects.dialect import File, write_file
from mindlora.files.adapters.dialects.mindformers import MCORE, MindFormers, tensor_key
from mindlora.models import names
from mindlora.models.architectures import architecture, registry


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

    def prepared(self, adapter: Adapter) -> Adapter:
        return one_rank(adapter)

    def write(self, adapter: Adapter, path: str) -> None:
        self.refuse_single_experts(adapter)
        adapter = self.prepared(adapter)
        paths = mcore_paths(adapter)
        unknown = [path for path in paths if names.is_expert_weight(path)]
        if unknown:
            refuse_cells(unknown)
        tensors = {tensor_key(paths[cell], part, MCORE): array for (cell, part), array in adapter.tensors.items()}
        write_file(path, tensors, adapter_metadata.header(adapter))


def mcore_paths(adapter: Adapter) -> Dict[str, str]:
    """Returns path -> path in mcore; raises AdapterError for cells that MindFormers' own LoRA does not know."""
    variant = adapter.variant
    if not variant.is_plain:
        raise AdapterError(
            f"MindFormers' mcore models do not read {variant.tensors} ({variant.field}). Merge the adapter into its "
            "base, or write format 'peft'."
        )
    if adapter.trained_modules:
        raise AdapterError(
            "MindFormers' mcore LoRA has no place for saved modules (modules_to_save): "
            f"{', '.join(adapter.trained_modules)}. Merge the adapter into its base, or write format 'peft'."
        )
    # The Llama has the cells of Qwen3 and others, under the same names.
    record = names.architecture_of_cells(adapter.paths) or registry.ARCHITECTURES[0]
    renamed = {}
    unknown = []
    for path in adapter.paths:
        renamed[path] = record.rename_path(path, architecture.LEGACY, architecture.MCORE) or names.to_mcore(path)
        adaptable = names.is_linear(path) or names.is_expert_weight(path)
        if path in adapter.embeddings or renamed[path] == path or not adaptable:
            unknown.append(path)
    if unknown:
        refuse_cells(unknown)
    return renamed


def refuse_cells(paths: Iterable[str]) -> NoReturn:
    """Raises AdapterError for pairs of cells that MindFormers' own LoRA does not adapt."""
    raise AdapterError(
        f"MindFormers' mcore models put no LoRA on cells such as {listed(paths)}. Write format 'peft', which "
        "mindlora loads."
    )


def one_rank(adapter: Adapter) -> Adapter:
    """Returns ``adapter`` with all pairs zero-padded to its largest rank, and one scale, to which B is rescaled."""
    tensors = dict(adapter.tensors)
    largest = max(adapter.paths, key=adapter.rank)
    rank = adapter.rank(largest)
    scale = adapter.scale(largest)
    for path in adapter.paths:
        layout = adapter.layout(path)
        b = scaled(adapter.tensors[path, "B"], adapter.scale(path) / scale)
        tensors[path, "A"] = layout.with_rank("A", adapter.tensors[path, "A"], rank)
        tensors[path, "B"] = layout.with_rank("B", b, rank)
    alphas = dict.fromkeys(adapter.paths, scale * rank)
    return dataclasses.replace(adapter, tensors=tensors, alphas=alphas, use_rslora=False)


def without_zeros(adapter: Adapter) -> None:
    """Removes the ranks that one_rank added: trailing ones that are zero in A and in B, which could never train."""
    for path in adapter.paths:
        layout = adapter.layout(path)
        size = adapter.rank(path)
        rank = layout.used_rank(adapter.tensors[path, "A"], adapter.tensors[path, "B"])
        if rank < size:
            adapter.alphas[path] *= rank / size
            for half in "AB":
                adapter.tensors[path, half] = layout.with_rank(half, adapter.tensors[path, half], rank)
