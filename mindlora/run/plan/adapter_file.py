"""The size of the file that save_lora will write, from shapes alone."""

from typing import Dict, List, Optional, Tuple

import numpy as np

from mindlora.core.formats.safetensors_file import layout
from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import named_dtype
from mindlora.core.numerics.pair_shapes import Shape
from mindlora.files.adapters import metadata
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft
from mindlora.models import names
from mindlora.models.architectures.joined_rows import HeadSizes
from mindlora.models.lora_config import LoraConfig
from mindlora.models.weights import Weight
from mindlora.run.plan.run import Run

_Entry = Tuple[str, np.dtype, Shape]
# A fingerprint has hashes of 16 digits each (mindlora.files.adapters.fingerprint).
_HASH = "0" * 16


def adapter_file_size(run: Run) -> Optional[int]:
    """Returns the bytes of adapter_model.safetensors in PEFT's folder, or None if they cannot be predicted.

    A run without an adapter saves none, AdaLoRA saves the ranks that remain after training, and the parts of a
    ChatGLM's joined cells are saved as one pair, whose rank depends on their values.
    """
    if run.lora is None or run.selection is None or not run.lora.variant.in_files or _joins_parts(run):
        return None
    saved = run.lora.as_saved()
    adapted = list(run.adapted)
    entries: List[_Entry] = []
    modules = peft.module_paths([path for path in adapted if path in run.experts])
    for cell in run.selection.cells.values():
        # Under the joined cell's path, for which the ranks were given.
        rank = saved.for_cell(cell.prefix).lora_rank
        if cell.prefix in modules:
            pair = saved.variant.part_shapes(cell.layout, cell.shape, rank)
            entries += _stacked_entries(modules[cell.prefix], pair, saved)
            continue
        for path, shape in _split_cells(run, cell.prefix, cell.shape).items():
            for part, part_shape in saved.variant.part_shapes(cell.layout, shape, rank).items():
                entries.append(_entry(path, part, part_shape, saved))
    for part, shape in run.selection.shared.items():
        entries.append(_entry("", part, shape, saved))
    for weight in run.weights:
        if weight.name in run.selection.saved:
            # With the head, so that PEFT does not untie them.
            heads = _tied_heads(run, weight) if weight.path not in adapted else []
            for name in (weight.name, *(f"{head}.weight" for head in heads)):
                key = peft.saved_module_key(name, adapted)
                entries.append((key, named_dtype(weight.dtype), weight.shape))
    return layout(sorted(entries, key=lambda entry: entry[0]), _header(run))[2]


def _stacked_entries(module: str, parts: Dict[str, Shape], lora: LoraConfig) -> List[_Entry]:
    """Returns the entries of a stacked pair, whose experts are side by side in PEFT's layout."""
    (experts, rank, columns), (_, rows, _) = parts["A"], parts["B"]
    flat = {"A": (experts * rank, columns), "B": (rows, experts * rank)}
    return [_entry(module, part, shape, lora) for part, shape in flat.items()]


def _split_cells(run: Run, path: str, shape: Shape) -> Dict[str, Shape]:
    """Returns path -> (out, in) of PEFT's cells for the one at ``path``."""
    joined = run.architecture.joined_cell(path)
    members = run.architecture.joined_parts(path)
    if joined is None or run.architecture.in_hugging_face(path):
        return {path: shape}
    attention = run.attention
    # Only the size of a head separates the rows of q from those of k and v, and only the cache those of a latent.
    head_dim = attention.queries // attention.heads
    first = shape[0] - attention.cached if attention.latent else None
    group = joined.layout.sizes(shape[0], HeadSizes(None, attention.keys // head_dim, head_dim, first))
    rows = [size * (shape[0] // sum(group)) for size in group] if group else [shape[0] // len(members)] * len(members)
    return {member: (rows_of_member, shape[1]) for member, rows_of_member in zip(members, rows)}


def _joins_parts(run: Run) -> bool:
    """Returns whether the file has one pair for several of the network's: the parts of a ChatGLM's joined cells."""
    joined = filter(None, map(run.architecture.joined_path, run.adapted))
    return any(map(run.architecture.in_hugging_face, joined))


def _entry(path: str, part: str, shape: Shape, lora: LoraConfig) -> _Entry:
    return peft.tensor_key(path, part, names.is_embedding(path)), named_dtype(lora.param_init_type), shape


def _tied_heads(run: Run, weight: Weight) -> List[str]:
    """Returns the path of the output head, if its weight is this one: the table of the embedding."""
    heads = [path for path in run.linear if names.is_output_head(path) and f"{path}.weight" not in run.parameters]
    return heads if weight.path == run.embedding[0] else []


def _header(run: Run) -> Dict[str, str]:
    fingerprint = {"shapes": _HASH, "values": _HASH}
    # The matrices under the adapters, including 4-bit ones. Each stacked weight is adapted under its own path.
    base = [weight for weight in run.weights if not weight.adapter and len(weight.shape) > 1]
    adapted = set(run.adapted)
    dtypes = {weight.dtype for weight in base if {weight.path, weight.name, *_tied_heads(run, weight)} & adapted}
    if len(dtypes) == 1 and "uint8" not in dtypes:
        fingerprint.update(dtype=dtypes.pop(), float16=_HASH, bfloat16=_HASH)
    adapter = Adapter({}, fingerprint=fingerprint)
    if run.lora and run.lora.quantize_base and "uint8" in dtypes:
        form = f"int{next(iter(run.held.values())).bits}" if run.held else run.lora.quantize_base
        fingerprint["quantization"] = "loftq" if initializers.is_loftq(run.lora.lora_init) else form
    if run.lora and initializers.changes_base(run.lora.lora_init):
        adapter.initialization = run.lora.lora_init
    return metadata.peft_header(adapter)
