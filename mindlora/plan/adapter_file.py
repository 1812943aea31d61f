"""The size of the file that save_lora will write, from shapes alone."""

from typing import Dict, List, Optional, Tuple

import numpy as np

from mindlora.adapters import metadata
from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects import peft
from mindlora.config import LoraConfig
from mindlora.formats.safetensors_file import layout
from mindlora.models import names
from mindlora.numerics import initializers
from mindlora.numerics.dtypes import BFLOAT16
from mindlora.plan.run import Run
from mindlora.plan.weights import Shape, Weight, adapted_cells, parts_of, shared_projection

_Entry = Tuple[str, np.dtype, Shape]
# A fingerprint has two hashes of 16 digits each (mindlora.adapters.fingerprint).
_HASH = "0" * 16


def adapter_file_size(run: Run, weights: List[Weight]) -> Optional[int]:
    """Returns the bytes of adapter_model.safetensors as PEFT's folder has it, or None if there is no telling.

    A run without an adapter saves none, and AdaLoRA saves the ranks that training leaves.

    Args:
        run (Run): The run.
        weights (list of Weight): Its parameters.
    """
    if run.lora is None or run.lora.use_adalora:
        return None
    saved = run.lora.as_saved()
    adapted = adapted_cells(run)
    entries: List[_Entry] = []
    for path, shape in adapted.items():
        for own, size in _split_cells(run, path, shape).items():
            for part, part_shape in parts_of(saved, own, size).items():
                # PEFT's rank_pattern is resolved by the joined cell's path, under which the ranks were given.
                entries.append(_entry(own, part, _with_rank(part_shape, saved.for_cell(path).lora_rank, part), saved))
    for part, shape in shared_projection(saved, adapted).items():
        entries.append(_entry("", part, shape, saved))
    for weight in weights:
        if not weight.adapter and weight.trained and _is_saved_module(weight, run.lora.modules_to_save):
            key = peft.saved_module_key(weight.name, list(adapted))
            entries.append((key, _dtype(weight.dtype), weight.shape))
    return layout(sorted(entries, key=lambda entry: entry[0]), {"format": "pt", metadata.KEY: _metadata(run)})[2]


def _split_cells(run: Run, path: str, shape: Shape) -> Dict[str, Shape]:
    """Returns path -> (out, in) of the cells that PEFT knows in the place of the one at ``path``."""
    members = names.joined_parts(path)
    if not members:
        return {path: shape}
    # Only the size of a head tells the rows of q from those of k and v.
    head_dim = run.attention_widths[0] // run.heads
    group = names.joined_cell(path).layout.sizes(shape[0], run.attention_widths[1] // head_dim, head_dim)
    rows = [size * (shape[0] // sum(group)) for size in group] if group else [shape[0] // len(members)] * len(members)
    return {member: (own, shape[1]) for member, own in zip(members, rows)}


def _with_rank(shape: Shape, rank: int, part: str) -> Shape:
    return {"A": (rank, *shape[1:]), "B": (*shape[:1], rank), "lambda_d": (rank,)}.get(part, shape)


def _entry(path: str, part: str, shape: Shape, lora: LoraConfig) -> _Entry:
    return peft.tensor_key(path, part, names.is_embedding(path)), _dtype(lora.param_init_type), shape


def _is_saved_module(weight: Weight, modules: Optional[List[str]]) -> bool:
    return any(names.belongs_to(weight.name, module) for module in modules or ())


def _metadata(run: Run) -> str:
    fingerprint = {"shapes": _HASH, "values": _HASH}
    adapter = Adapter({}, fingerprint=fingerprint)
    if run.lora and run.lora.quantize_base:
        fingerprint["quantization"] = "loftq" if initializers.is_loftq(run.lora.lora_init) else run.lora.quantize_base
    if run.lora and initializers.changes_base(run.lora.lora_init):
        adapter.initialization = run.lora.lora_init
    return metadata.peft_text_of(adapter)


def _dtype(name: str) -> np.dtype:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)
