"""The weights of compressed-tensors (llm-compressor): packed integers, 8-bit integers, and FP8.

W = (code - zero) * scale, with a scale for each group of columns, each row, each block, or the tensor. pack-quantized
packs codes of a row in words, each plus 2^(bits - 1); its zeros are packed along the rows. Quantized activations
stay in float here.

Source: compressed-tensors' PackedQuantizationCompressor and NaiveQuantizationCompressor.
"""

import functools
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import FLOAT8_E4M3, FLOATS
from mindlora.files.base.quantized.fp8 import VALUES, is_block, scaled
from mindlora.files.base.quantized.gptq import INT32, group_order
from mindlora.files.base.quantized.stored import Integers, PackedWeight, StoredTensors, as_signed, unpacked, words_for

_PACKED = ".weight_packed"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_BITS = range(1, 9)
_INT8, _INT64 = np.dtype("i1"), np.dtype("<i8")


class _Schemes(NamedTuple):
    """The weights' schemes in config_groups; a tensor's shapes show which scheme it has.

    Attributes:
        bits (list of int): num_bits.
        groups (list of int): group_size.
        block (list or None): block_structure, [rows, columns].
        has_zeros (bool): Whether all schemes are asymmetric, so that every weight has zeros.
        has_order (bool): Whether all have reordered columns (actorder "group"), so that every weight stores its order.
    """

    bits: List[int]
    groups: List[int]
    block: Optional[List[int]]
    has_zeros: bool
    has_order: bool


def weights(stored: StoredTensors, settings: Mapping[str, Any]) -> List[PackedWeight]:
    """Returns the weights in one of the formats; ``settings`` is compressed-tensors' quantization_config.

    Raises CheckpointError, naming the setting or the tensor, if they cannot be decoded.
    """
    schemes = _schemes(stored, settings)
    made = []
    for name, info in stored.tensors.items():
        if name.endswith(_PACKED):
            made.append(_packed(stored, name[: -len(_PACKED)], schemes))
        elif name.endswith(".weight") and info.dtype == _INT8:
            made.append(_in_int8(stored, name[: -len(".weight")], schemes))
        elif name.endswith(".weight") and info.dtype == FLOAT8_E4M3:
            stored.matrix(name)
            stored.part(name, f"{name}_scale")
            is_grid = len(stored.tensors[f"{name}_scale"].shape) == 2 and stored.tensors[f"{name}_scale"].shape[1] > 1
            made.append(scaled(stored, name, f"{name}_scale", schemes.block if is_grid else None, VALUES, "FP8"))
    return made


def _schemes(stored: StoredTensors, settings: Mapping[str, Any]) -> _Schemes:
    groups = _objects(stored, settings, "config_groups")
    of_weights = [_objects(stored, group, "weights") for group in groups.values() if isinstance(group, dict)]
    formats = [settings.get("format"), *(group.get("format") for group in groups.values() if isinstance(group, dict))]
    blocks = [one["block_structure"] for one in of_weights if one.get("block_structure") is not None]
    if blocks and not is_block(blocks[0]):
        raise CheckpointError(
            f"{stored.path}: block_structure of config_groups is {blocks[0]!r}, which is not two whole numbers of at "
            "least 1. Copy config.json again."
        )
    unknown = [one for one in formats if one not in (None, "mixed-precision", "dense", *_FORMATS)]
    sparse = _objects(stored, settings, "sparsity_config").get("format") not in (None, "dense")
    rotated = bool(_objects(stored, settings, "transform_config").get("config_groups"))
    in_blocks = any(one.get("block_structure") is not None and one.get("type") == "int" for one in of_weights)
    reasons = {"integers in blocks": in_blocks, "sparsity_config": sparse, "transform_config": rotated}
    wrong = [f"format {one!r}" for one in unknown] + [reason for reason, holds in reasons.items() if holds]
    if wrong:
        raise CheckpointError(
            f"{stored.path} is of compressed-tensors with {wrong[0]}, which cannot be read: {', '.join(_FORMATS)} can, "
            "without sparsity and transforms. Take the original model, or one in these formats."
        )
    return _Schemes(
        [one["num_bits"] for one in of_weights if type(one.get("num_bits")) is int and one["num_bits"] in _BITS],
        [one["group_size"] for one in of_weights if one.get("group_size") not in (None, -1)],
        blocks[0] if blocks else None,
        bool(of_weights) and all(one.get("symmetric") is False for one in of_weights),
        bool(of_weights) and all(one.get("actorder") == "group" for one in of_weights),
    )


def _objects(stored: StoredTensors, settings: Mapping[str, Any], key: str) -> Dict[str, Any]:
    """Returns an object of the settings, or an empty one if it is missing."""
    value = settings.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{stored.path}: {key} of config.json is {value!r}, not an object. Copy it again.")
    return value


def _packed(stored: StoredTensors, path: str, schemes: _Schemes) -> PackedWeight:
    packed, scale, zero, sizes, g_idx = (
        f"{path}.weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")
    )
    rows, words = stored.matrix(packed)
    stored.part(packed, sizes)
    stored.check(sizes, [(2,)], [_INT64, INT32], packed)
    shape = tuple(int(size) for size in stored.read(sizes))
    candidates = [bits for bits in schemes.bits if words == words_for(shape[1], bits)]
    if shape[0] != rows or shape[1] < 1 or not candidates:
        raise CheckpointError(
            f"{stored.path}: {packed} is {[rows, words]} of int32, which are not the {list(shape)} that {sizes} says "
            f"in the num_bits of config.json, {schemes.bits}. Copy the model and its config.json again."
        )
    bits, columns = candidates[0], shape[1]
    why = f"{packed} in {bits} bits"
    stored.check(packed, [(rows, words)], [INT32], why)
    groups = _groups(stored, scale, packed, (rows, columns), schemes)
    parts = [packed, scale, sizes]
    if schemes.has_zeros:
        stored.part(packed, zero)
    if zero in stored.tensors:
        parts.append(zero)
        stored.check(zero, [(words_for(rows, bits), groups)], [INT32], why)
    order = None
    if schemes.has_order:
        stored.part(packed, g_idx)
    if g_idx in stored.tensors:
        parts.append(g_idx)
        order = group_order(stored, g_idx, columns, groups, why)
    middle = np.uint8(1 << (bits - 1))

    def read_codes(begin: int, end: int) -> np.ndarray:
        codes = unpacked(stored.read_rows(packed, begin, end), bits, columns)
        return as_signed(codes) if bits == 8 else codes

    def read_zeros(begin: int, end: int) -> np.ndarray:
        zeros = np.full((1, 1), middle)
        if zero in stored.tensors:
            first = begin // 32 * 32
            read = stored.read_rows(zero, first * bits // 32, words_for(end, bits))
            zeros = unpacked(read.T, bits, end - first)[:, begin - first :].T
        return as_signed(zeros) if bits == 8 else zeros

    form = f"compressed-tensors' {bits} bits" + (" in groups" if groups > 1 else "")
    read_scales = functools.partial(_scales, stored, scale)
    integers = Integers(bits, groups, stored.tensors[scale].dtype, read_codes, read_zeros, read_scales, order)
    return integers.as_weight(f"{path}.weight", (rows, columns), tuple(parts), form)


def _in_int8(stored: StoredTensors, path: str, schemes: _Schemes) -> PackedWeight:
    name, scale, zero = f"{path}.weight", f"{path}.weight_scale", f"{path}.weight_zero_point"
    rows, columns = stored.matrix(name)
    groups = _groups(stored, scale, name, (rows, columns), None)
    parts = [name, scale]
    if schemes.has_zeros:
        stored.part(name, zero)
    if zero in stored.tensors:
        parts.append(zero)
        stored.check(zero, [stored.tensors[scale].shape], [_INT8], name)

    def read_zeros(begin: int, end: int) -> np.ndarray:
        return _scales(stored, zero, begin, end) if zero in stored.tensors else np.zeros((1, 1), np.int8)

    form = "compressed-tensors' 8-bit integers" + (" in groups" if groups > 1 else "")
    read_codes = functools.partial(stored.read_rows, name)
    read_scales = functools.partial(_scales, stored, scale)
    integers = Integers(8, groups, stored.tensors[scale].dtype, read_codes, read_zeros, read_scales)
    return integers.as_weight(name, (rows, columns), tuple(parts), form)


def _groups(stored: StoredTensors, scale: str, name: str, shape: Tuple[int, int], schemes: Optional[_Schemes]) -> int:
    """Returns the number of groups into which the scales divide a weight's columns."""
    rows, columns = shape
    of_scale = stored.part(name, scale).shape
    groups = of_scale[1] if len(of_scale) == 2 else 1
    shapes = [(rows, groups), (rows,), (1,), (1, 1), ()]
    stored.check(scale, shapes, FLOATS, name)
    sizes = schemes.groups if schemes and groups > 1 else []
    if not groups or columns % groups or sizes and columns // groups not in sizes:
        raise CheckpointError(
            f"{stored.path}: {scale} has {groups} groups for the {columns} in_channels of {name}, and group_size in "
            f"config.json is {sizes}. Copy the model and its config.json again."
        )
    return groups


def _scales(stored: StoredTensors, name: str, begin: int, end: int) -> np.ndarray:
    """Returns the scales or zeros of rows [begin, end): [end - begin, groups], or [1, 1] for a single one."""
    shape = stored.tensors[name].shape
    if not shape or shape[0] == 1:
        return stored.read(name).reshape(1, -1)
    return stored.read_rows(name, begin, end).reshape(end - begin, -1)
