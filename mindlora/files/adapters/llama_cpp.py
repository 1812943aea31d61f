"""Adapters for llama.cpp: a GGUF file, loaded beside the base's (llama-server --lora)."""

import functools
from typing import Dict, List, NamedTuple, Optional

import numpy as np

from mindlora.core.errors import AdapterError
from mindlora.core.formats import gguf_file
from mindlora.core.formats.gguf_file import GgufTensor
from mindlora.core.numerics.dtypes import scaled, to_float32
from mindlora.core.numerics.pair_shapes import EMBEDDING, LINEAR
from mindlora.core.text import listed, suggestion
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.models import llama_cpp, names
from mindlora.models.llama_cpp import LlamaCppModel

FORM = "gguf"
MERGE = "Merge it into the base, which llama.cpp takes as a whole: mindlora base merge --to gguf."


class Base(NamedTuple):
    """Facts about the base under an adapter, from its config.json; None where unknown.

    Attributes:
        heads (int): Number of attention heads; ``kv_heads`` is that of keys and values.
        tied (bool): Whether the output head is the embedding.
    """

    model_type: Optional[str] = None
    heads: Optional[int] = None
    kv_heads: Optional[int] = None
    tied: bool = False


def check_output(path: str) -> None:
    """Raises LoraError if ``path`` does not end in .gguf, InstallationError if the package gguf is missing."""
    gguf_file.require_gguf()
    adapter_files.check_file_output(path, FORM, gguf_file.ENDING)


def write(adapter: Adapter, path: str, base: Base) -> None:
    """Writes an adapter in one atomic step, in float32, since llama.cpp rounds its operands to the dtype of the pair.

    llama.cpp multiplies every pair by lora_alpha / r, with one lora_alpha for the file and the rank of the pair. A pair
    of another scale gets the remaining factor multiplied into its B.

    Args:
        adapter (Adapter): With Hugging Face's cells.
        path (str): A file that ends in .gguf.
        base (Base): Its model_type is needed, and its heads where llama.cpp orders the rows of q and k its own way
            (Llama).

    Raises:
        AdapterError: llama.cpp has no place for some part of it, the base is not known well enough, or a tensor holds
            NaN or infinity.
        InstallationError: The package gguf is not installed.
    """
    adapter_files.check_complete(adapter, path)
    problems = refusals(adapter)
    if problems:
        raise AdapterError(problems[0])
    tables = [path for path in adapter.paths if path in adapter.embeddings or names.is_output_head(path)]
    if tables and base.tied:
        raise AdapterError(
            f"It adapts {listed(tables)}, and {adapter.base_model or 'its base'} has one table for embedding and "
            f"output head, to which llama.cpp adds no pair of one of them alone. {MERGE}"
        )
    model = _model(base.model_type)
    cells = adapter.paths
    alpha = adapter.scale(cells[0]) * adapter.rank(cells[0])
    tensors: List[GgufTensor] = []
    for cell in cells:
        for half, array in _pair(adapter, cell, alpha, model, base).items():
            name = f"{_tensor(cell)}.lora_{half}"
            tensors.append(GgufTensor(name, array.shape, gguf_file.F32, functools.partial(np.ascontiguousarray, array)))
    metadata: Dict[str, gguf_file.Value] = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    if adapter.base_model:
        metadata["general.base_model.count"] = gguf_file.Uint32(1)
        metadata["general.base_model.0.name"] = adapter.base_model
    gguf_file.write(path, model.name, metadata, tensors)


def refusals(adapter: Adapter) -> List[str]:
    """Returns the reasons why llama.cpp would refuse an adapter or leave out a part of it."""
    problems = []
    if not adapter.variant.is_plain:
        problems.append(
            f"It is a {adapter.variant.name} adapter ({adapter.variant.field}), and llama.cpp has plain LoRA alone. "
            f"{MERGE}"
        )
    replaced = [*adapter.trained_modules, *adapter.token_rows]
    if replaced:
        problems.append(
            f"It replaces weights of the base ({listed(replaced)}), and llama.cpp adds pairs alone. {MERGE}"
        )
    odd = [path for path in adapter.paths if adapter.layout(path) not in (LINEAR, EMBEDDING) or _tensor(path) is None]
    if odd:
        problems.append(f"It adapts cells for which mindlora knows no tensor of llama.cpp: {listed(odd)}. {MERGE}")
    return problems


def _tensor(path: str) -> Optional[str]:
    """Returns llama.cpp's name for the weight at a path of an adapter."""
    name = llama_cpp.cell_name(names.to_hugging_face(path))
    return name and f"{name}.weight"


def _model(model_type: Optional[str]) -> LlamaCppModel:
    if model_type is None:
        raise AdapterError(
            "A GGUF file says which model it is for, but nothing tells it here: the adapter's base is not a folder "
            "with its config.json. Name the base's folder or YAML (--base); there are GGUF files of "
            f"{', '.join(llama_cpp.MODELS)}."
        )
    if model_type not in llama_cpp.MODELS:
        raise AdapterError(
            f"The base is a {model_type}, for which mindlora writes no GGUF: it does for {', '.join(llama_cpp.MODELS)}."
            f"{suggestion(model_type, list(llama_cpp.MODELS))} llama.cpp's convert_lora_to_gguf.py may have it; it "
            "reads what format 'peft' writes."
        )
    return llama_cpp.MODELS[model_type]


def _pair(adapter: Adapter, cell: str, alpha: float, model: LlamaCppModel, base: Base) -> Dict[str, np.ndarray]:
    """Returns "a" and "b" of a cell in llama.cpp's layout."""
    a, b = (to_float32(adapter.tensors[cell, half]) for half in "AB")
    b = scaled(b, adapter.scale(cell) * adapter.rank(cell) / alpha)
    if cell in adapter.embeddings:
        # It takes rows of A by token.
        return {"a": a.T, "b": b}
    path = names.to_hugging_face(cell)
    if model.rotates_neighbors and llama_cpp.is_rotated(path):
        count = base.heads if path.endswith("q_proj") else base.kv_heads
        if not count or len(b) % (2 * count):
            raise AdapterError(
                f"llama.cpp orders the rows of {path} by heads. It has {len(b)} rows, but the number of heads is "
                f"{count or 'not known'}. Name the base's folder or YAML (--base)."
            )
        b = llama_cpp.neighbors_from_halves(b, count)
    return {"a": a, "b": b}
