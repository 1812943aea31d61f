"""Weights in FP8 (float8_e4m3): W = codes * scale, with a scale for each block, each row, or the tensor.

DeepSeek-V3 and Qwen3-FP8 have blocks of 128 x 128 and call the scales weight_scale_inv, although they are factors
too; others have weight_scale.

Sources: DeepSeek-V3's inference code and transformers' finegrained_fp8, which decode the same way; Micikevicius et al.,
FP8 Formats for Deep Learning, 2022, for E4M3.
"""

import functools
from typing import Any, List, Mapping, Optional, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import FLOAT8_E4M3, FLOATS, to_float32
from mindlora.files.base.quantized.stored import PackedWeight, StoredTensors


def _values() -> np.ndarray:
    """Returns the float32 values of the 256 codes of E4M3: no infinity, and NaN where all seven bits are set."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents > 0, (8 + fractions) * 2.0 ** (exponents - 10), fractions * 2.0**-9)
    sizes[codes & 127 == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


VALUES = _values()


def weights(stored: StoredTensors, settings: Mapping[str, Any]) -> List[PackedWeight]:
    """Returns the weights in FP8; ``settings`` may have weight_block_size, [rows, columns].

    Raises CheckpointError, naming the tensor, if a scale is missing or does not suit its weight.
    """
    block = settings.get("weight_block_size")
    if block is not None and not is_block(block):
        raise CheckpointError(
            f"{stored.path}: weight_block_size of quantization_config is {block!r}, which is not two whole numbers of "
            "at least 1. Copy config.json again."
        )
    names = [name for name, info in stored.tensors.items() if info.dtype == FLOAT8_E4M3]
    return [in_float8(stored, name, block) for name in names]


def in_float8(stored: StoredTensors, name: str, block: Optional[List[int]]) -> PackedWeight:
    """Returns the weight ``name``; ``block`` is the size of the blocks that have a scale each, if any."""
    info = stored.tensors[name]
    if len(info.shape) != 2 or not name.endswith(".weight"):
        raise CheckpointError(
            f"{stored.path}: {name} is float8_e4m3 {list(info.shape)}, and only the weights of linear cells, [out, "
            "in], are decoded from FP8. Save the model in bfloat16 with transformers."
        )
    scales = [f"{name}_scale_inv", f"{name}_scale"]
    if all(scale in stored.tensors for scale in scales):
        raise CheckpointError(
            f"{stored.path} holds both {scales[0]} and {scales[1]}: one of them is wrong. Copy the model again."
        )
    stored.part(name, *scales)
    scale = next(scale for scale in scales if scale in stored.tensors)
    return scaled(stored, name, scale, block, VALUES, "FP8")


def scaled(
    stored: StoredTensors, name: str, scale: str, block: Optional[List[int]], values: np.ndarray, kind: str
) -> PackedWeight:
    """Returns the weight that is values[codes] * scale.

    Args:
        stored (StoredTensors): The tensors.
        name (str): Name of the codes, [out, in], of one byte each.
        scale (str): Name of the scales: of blocks if ``block`` is given, else [out] or [out, 1], or a single one.
        block (list): Rows and columns of a block, or None.
        values (ndarray): The float32 value of each of 256 codes.
        kind (str): The kind of the codes, for reports.
    """
    rows, columns = stored.matrix(name)
    form = f"{kind} with one scale"
    if block is None:
        height, width = rows, columns
        stored.check(scale, [(), (1,), (1, 1), (rows,), (rows, 1)], FLOATS, name)
        if stored.tensors[scale].shape in ((rows,), (rows, 1)):
            height, form = 1, f"{kind} with a scale for each row"
    else:
        height, width = block
        form = f"{kind} in blocks of {height} x {width}"
        grid = -(-rows // height), -(-columns // width)
        stored.check(scale, [grid], FLOATS, f"{name} with weight_block_size {block}")
    read = functools.partial(_rows, stored, name, scale, (height, width), values)
    return PackedWeight(name, (rows, columns), (name, scale), form, read)


def _rows(
    stored: StoredTensors, name: str, scale: str, block: Tuple[int, int], values: np.ndarray, begin: int, end: int
) -> np.ndarray:
    height, width = block
    decoded = values[stored.read_rows(name, begin, end).view(np.uint8)]
    first = begin // height
    of_blocks = to_float32(stored.read_rows(scale, first, -(-end // height)))
    of_blocks = of_blocks.reshape(-(-end // height) - first, -1)
    of_rows = of_blocks[np.arange(begin, end) // height - first]
    if of_rows.shape[1] > 1:
        of_rows = np.repeat(of_rows, width, axis=1)[:, : decoded.shape[1]]
    decoded *= of_rows
    return decoded


def is_block(block: Any) -> bool:
    """Returns whether the value is the rows and columns of a block."""
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
