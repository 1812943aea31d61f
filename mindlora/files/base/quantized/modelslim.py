"""msModelSlim's weights in 8-bit integers and FP8 (W8A8, W8A16, ...), as Ascend's model zoo publishes them.

W = (code - weight_offset) * weight_scale, per row or per group of its columns. A weight in W8A8 may lack both:
then W = code * deq_scale / input_scale. quant_model_description.json describes each tensor; tensors that quantize
activations (input_scale, deq_scale, quant_bias, ...) are left out.

Sources: msModelSlim 26.1, which writes them (ascendv1.py, complex_quantifier.py); vllm-ascend, which reads them.
"""

import functools
from typing import Any, Callable, List, Mapping, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import FLOAT8_E4M3, FLOATS, to_float32
from mindlora.core.text import examples
from mindlora.files.base.quantized.fp8 import VALUES
from mindlora.files.base.quantized.stored import Integers, PackedWeight, StoredTensors, from_groups

DESCRIPTION = "quant_model_description"
_FLOAT = "FLOAT"
_INT8, _INT64, _FLOAT32 = np.dtype("i1"), np.dtype("<i8"), np.dtype("<f4")
# Kind -> the dtype of its codes.
_KINDS = {
    **dict.fromkeys(("W8A8", "W8A8_MIX", "W8A8S", "W8A8_DYNAMIC", "W8A16", "W4A4_DYNAMIC"), _INT8),
    "WFP8AFP8_DYNAMIC": FLOAT8_E4M3,
}
# Activations have one scale there, and the file may hold only its product with the weight's scales.
_WITH_INPUT_SCALE = ("W8A8", "W8A8S")
# The ends of tensors with which a model rotates its activations as it runs.
_TURNS = (".heads_rotation", ".kronecker_rotation_m", ".kronecker_rotation_n", ".div.mul_scale")
# (begin, end) of rows -> float32.
Rows = Callable[[int, int], np.ndarray]


def weights(stored: StoredTensors, settings: Mapping[str, Any]) -> List[PackedWeight]:
    """Returns the weights in 8 bits; ``settings`` is the content of quant_model_description.json.

    Raises CheckpointError, naming the tensor, if one is missing, wrong, or of a kind that cannot be read.
    """
    turns = [name for name in stored.tensors if name.endswith(_TURNS)]
    if turns:
        raise CheckpointError(
            f"{stored.path} holds {examples(turns)}, by which msModelSlim's model changes its activations while it "
            "runs, and the model without them is another one. Take the original model, or one quantized without "
            "online rotation and smoothing."
        )
    kinds = {name: settings.get(name, _FLOAT) for name in stored.tensors if name.endswith(".weight")}
    unknown = [name for name, kind in kinds.items() if kind not in (_FLOAT, *_KINDS)]
    if unknown:
        raise CheckpointError(
            f"{stored.path}: {DESCRIPTION}.json says {kinds[unknown[0]]!r} of {examples(unknown)}, and "
            f"{', '.join((_FLOAT, *_KINDS))} can be read. Take the original model, or one in these."
        )
    return [_weight(stored, name, str(kind)) for name, kind in kinds.items() if kind != _FLOAT]


def _weight(stored: StoredTensors, name: str, kind: str) -> PackedWeight:
    rows, columns = stored.matrix(name)
    stored.check(name, [(rows, columns)], [_KINDS[kind]], f"{kind} in {DESCRIPTION}.json")
    scale = f"{name}_scale"
    if scale not in stored.tensors and kind in _WITH_INPUT_SCALE:
        parts, scales, zeros = _through_inputs(stored, name)
    else:
        parts, scales, zeros = _stated(stored, name)

    in_groups = scale in stored.tensors and stored.tensors[scale].shape[1:] > (1,)
    form = f"msModelSlim's {kind}" + (" in groups" if in_groups else "")
    if _KINDS[kind] != FLOAT8_E4M3:
        groups = stored.tensors[scale].shape[1] if in_groups else 1
        codes = functools.partial(stored.read_rows, name)
        integers = Integers(8, groups, _FLOAT32, codes, zeros, scales)
        return integers.as_weight(name, (rows, columns), (name, *parts), form)

    def decoded(begin: int, end: int) -> np.ndarray:
        codes = VALUES[stored.read_rows(name, begin, end).view(np.uint8)]
        return from_groups(codes, zeros(begin, end), scales(begin, end))

    return PackedWeight(name, (rows, columns), (name, *parts), form, decoded)


def _stated(stored: StoredTensors, name: str) -> Tuple[Tuple[str, ...], Rows, Rows]:
    """Returns the tensors with the scales and the offsets of a weight, and the reader of their rows."""
    scale, offset = f"{name}_scale", f"{name}_offset"
    rows, columns = stored.matrix(name)
    groups = (*stored.part(name, scale).shape[1:], 1)[0]
    if not groups or columns % groups:
        raise CheckpointError(
            f"{stored.path}: {scale} has {groups} groups, which do not divide the {columns} in_channels of {name}. "
            "Copy the model again."
        )
    for part in (scale, offset):
        stored.part(name, part)
        stored.check(part, [(rows, groups), (rows,)] if groups == 1 else [(rows, groups)], FLOATS, name)

    def reads(part: str) -> Rows:
        return lambda begin, end: to_float32(stored.read_rows(part, begin, end)).reshape(end - begin, groups)

    return (scale, offset), reads(scale), reads(offset)


def _through_inputs(stored: StoredTensors, name: str) -> Tuple[Tuple[str, ...], Rows, Rows]:
    """Returns the same for a weight without them: deq_scale is the product of its scales and its inputs' scale."""
    path, rows = name.rpartition(".")[0], stored.matrix(name)[0]
    product, of_inputs = f"{path}.deq_scale", f"{path}.input_scale"
    stored.part(name, product)
    stored.part(name, of_inputs)
    # The file keeps the bits of float32 as int64, unless the model is in bfloat16.
    stored.check(product, [(rows,), (rows, 1)], [_FLOAT32, _INT64], name)
    stored.check(of_inputs, [(1,), ()], FLOATS, name)

    def scales(begin: int, end: int) -> np.ndarray:
        products = stored.read_rows(product, begin, end).reshape(-1, 1)
        products = products.astype("<i4").view(_FLOAT32) if products.dtype == _INT64 else products
        return products / to_float32(stored.read(of_inputs)).reshape(1, 1)

    return (product, of_inputs), scales, lambda begin, end: np.zeros((1, 1), np.float32)
