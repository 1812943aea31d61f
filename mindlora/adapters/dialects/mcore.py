"""What MindFormers' own LoRA on its mcore models reads: one rank and one scale for all cells, and their joined names.

The pairs have zeros up to the largest rank, so that BA stays the same. mindlora takes them off again when it reads.
"""

import dataclasses
from typing import Dict

import numpy as np

from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects.mindformers import MCORE, tensor_key
from mindlora.common.text import listed
from mindlora.errors import AdapterError
from mindlora.models import names, registry
from mindlora.models.architecture import LEGACY
from mindlora.models.architecture import MCORE as WORLD
from mindlora.numerics.dtypes import from_float32, to_float32


def tensors(adapter: Adapter) -> Dict[str, np.ndarray]:
    """Returns key -> array of the file that holds ``adapter``.

    Raises:
        AdapterError: It has a cell or is of a kind that MindFormers' own LoRA does not know.
    """
    own = _paths(adapter)
    return {tensor_key(own[path], part, MCORE): array for (path, part), array in adapter.tensors.items()}


def _paths(adapter: Adapter) -> Dict[str, str]:
    """Returns path -> path in mcore for the cells of ``adapter``."""
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
    architecture = names.architecture_of_cells(adapter.paths) or registry.ARCHITECTURES[0]
    found = {
        path: architecture.rename_path(path, LEGACY, WORLD) or names.to_mcore(path)
        for path in adapter.paths
        if path not in adapter.embeddings
    }
    unknown = [path for path in adapter.paths if found.get(path, path) == path or not names.is_linear(path)]
    if unknown:
        raise AdapterError(
            f"MindFormers' mcore models put no LoRA on cells such as {listed(unknown)}. Write format 'peft', which "
            "mindlora loads."
        )
    return found


def one_rank(adapter: Adapter) -> Adapter:
    """Returns ``adapter`` with its largest rank in all pairs, by zeros, and one scale, for which B is rescaled."""
    tensors = dict(adapter.tensors)
    largest = max(adapter.paths, key=adapter.rank)
    rank, scale = adapter.rank(largest), adapter.scale(largest)
    for path in adapter.paths:
        a, b = adapter.tensors[path, "A"], adapter.tensors[path, "B"]
        factor, missing = adapter.scale(path) / scale, rank - adapter.rank(path)
        if factor != 1:
            b = from_float32(to_float32(b) * np.float32(factor), b.dtype)
        tensors[path, "A"] = np.pad(a, ((0, missing), (0, 0)))
        tensors[path, "B"] = np.pad(b, ((0, 0), (0, missing)))
    alphas = dict.fromkeys(adapter.paths, scale * rank)
    return dataclasses.replace(adapter, tensors=tensors, alphas=alphas, use_rslora=False)


def without_zeros(adapter: Adapter) -> None:
    """Takes off what one_rank added: ranks at the end that are zero in A and in B. Such a rank can never train."""
    for path in adapter.paths:
        a, b = adapter.tensors[path, "A"], adapter.tensors[path, "B"]
        used = _used(a) + _used(b.T)
        own = 1 + max([index for index, count in enumerate(used) if count], default=len(a) - 1)
        if own < len(a) and path in adapter.alphas:
            adapter.alphas[path] *= own / len(a)
            adapter.tensors[path, "A"], adapter.tensors[path, "B"] = a[:own].copy(), b[:, :own].copy()


def _used(rows: np.ndarray) -> np.ndarray:
    """Returns for each row how many of its elements are not zero."""
    return np.count_nonzero(to_float32(rows), axis=1)
