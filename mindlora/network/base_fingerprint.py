"""Fingerprints of the base weights under the adapters of a network."""

from types import MappingProxyType
from typing import Callable, Container, Dict, Iterable, Mapping, NamedTuple, Optional, Tuple

import numpy as np
from mindspore import nn

from mindlora.core.numerics.pair_shapes import is_expert_stack
from mindlora.files.adapters.fingerprint import (
    fingerprint_from,
    mcore_path,
    sample_of_joined,
    sampled_elements,
    sampled_paths,
)
from mindlora.models.architectures.joined_rows import RowLayout
from mindlora.network.quantized.nf4 import matrix_shape
from mindlora.network.tensors import to_array
from mindlora.network.tree import lora_cells, weight_of


def base_fingerprint(network: nn.Cell, left_out: Container[str] = ()) -> Optional[dict]:
    """Returns the fingerprint of the weights under a network's adapters, as they were before initialize_adapters.

    It has "shapes", a hash of the paths and shapes of all adapted weights except those at ``left_out``, and
    "values", a hash of up to 1024 elements of each of up to 8 weights (of the codes, if weights are quantized); for
    weights in float their "dtype" and hashes of the same elements rounded to "float16" and "bfloat16"; for quantized
    ones "quantization", "nf4", "int4", "int8" or "loftq". It is None until MindSpore has allocated the weights.
    """
    cells = dict(lora_cells(network))
    for cell in cells.values():
        if cell.initial_pair:
            return cell.initial_pair.fingerprint
    return fingerprint_of({path: cell for path, cell in cells.items() if path not in left_out})


def fingerprint_of(cells: Dict[str, nn.Cell]) -> Optional[dict]:
    """Returns the fingerprint of the current weights of cells, in the form of base_fingerprint."""
    if any(weight_of(cell).has_init for cell in cells.values()):
        return None
    return _described(
        {path: weight_shape(cell) for path, cell in cells.items()},
        {path: sampled_elements(to_array(weight_of(cells[path]))) for path in sampled_paths(cells)},
        {getattr(cell, "quantization", None) for cell in cells.values()},
    )


def fingerprints_of(cells: Dict[str, nn.Cell]) -> Callable[[Iterable[str]], Optional[dict]]:
    """Returns a function that gives fingerprint_of for some of the cells, whose weights have values, as of this call.

    It holds samples of all weights and does not call MindSpore, so any thread may call it.
    """
    shapes = {path: weight_shape(cell) for path, cell in cells.items()}
    samples = {path: sampled_elements(to_array(weight_of(cell))) for path, cell in cells.items()}
    forms = {path: getattr(cell, "quantization", None) for path, cell in cells.items()}

    def fingerprint(paths: Iterable[str]) -> dict:
        chosen = list(paths)
        return _described(
            {path: shapes[path] for path in chosen},
            {path: samples[path] for path in sampled_paths(chosen)},
            {forms[path] for path in chosen},
        )

    return fingerprint


class Packed(NamedTuple):
    """A quantized weight: its form ("nf4", "int4" or "int8") and the shape of W, [experts * in, out] for experts."""

    form: str
    shape: Tuple[int, int]


def joined_fingerprints_of(
    weights: Mapping[str, np.ndarray],
    kv_heads: int,
    layouts: Mapping[str, RowLayout],
    packed: Mapping[str, Packed] = MappingProxyType({}),
) -> Callable[[Iterable[str]], Optional[dict]]:
    """As fingerprints_of, for the cells of MindFormers' mcore models that replace Hugging Face's.

    Adapters are trained on these cells.

    Args:
        weights (mapping): Adapter path -> weight [out, in] in float, including all parts of each joined cell; or
            [experts, out, in] for stacked experts. For quantized weights, the codes.
        kv_heads (int): Key-value heads.
        layouts (mapping): Name of a joined cell in mcore -> the order of its rows, where that differs from its
            record's.
        packed (mapping): Adapter path -> Packed, for the quantized weights.
    """
    trained = {path: mcore_path(path) for path in weights}
    forms = {trained[path]: weight.form for path, weight in packed.items()}
    widths = {trained[path]: weight.shape[1] for path, weight in packed.items()}
    shapes: Dict[str, Tuple[int, ...]] = {}
    samples: Dict[str, np.ndarray] = {}
    for path in dict.fromkeys(trained.values()):
        parts = [weights[cell] for cell in trained if trained[cell] == path]
        if is_expert_stack(parts[0]):
            experts, rows, columns = parts[0].shape
            shapes[path] = (experts * columns, rows)
            samples[path] = sampled_elements(parts[0].swapaxes(1, 2))
            continue
        shapes[path] = (sum(map(len, parts)), widths.get(path, parts[0].shape[1]))
        samples[path] = sample_of_joined(path, parts, kv_heads, layouts)

    def fingerprint(paths: Iterable[str]) -> dict:
        chosen = {trained[path] for path in paths}
        return _described(
            {path: shapes[path] for path in chosen},
            {path: samples[path] for path in sampled_paths(chosen)},
            {forms.get(path) for path in chosen},
        )

    return fingerprint


def _described(shapes, samples, forms):
    """Returns a fingerprint, with the form of quantized weights in it."""
    fingerprint = fingerprint_from(shapes, samples)
    kinds = forms - {None}
    if kinds:
        fingerprint["quantization"] = "loftq" if "loftq" in kinds else kinds.pop()
    return fingerprint


def weight_shape(cell: nn.Cell) -> Tuple[int, ...]:
    """Returns the shape of a cell's weight in a file of mcore; for a quantized one, W's and not the codes'."""
    if getattr(cell, "quantization", None) or hasattr(cell, "experts"):
        return matrix_shape(cell)
    return tuple(weight_of(cell).shape)
