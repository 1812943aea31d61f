"""4-bit NormalFloat: a weight in 4.13 bits per number. ops/nf4_linear/README.md describes the bytes.

Everything is NumPy and works on one tensor at a time, in about 20 ns per number.
Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
"""

import dataclasses
import math
from typing import Dict, Optional, Tuple

import numpy as np

from mindlora.core.errors import QuantizationError

# Quantiles of the standard normal distribution, scaled to [-1, 1], with an exact zero; values of the paper's code.
TABLE = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
# Weights in a block share an absmax; blocks in a group share a scale and an offset.
BLOCK, GROUP = 64, 256
# The two values of each of the 256 bytes: (low half, high half).
BYTE_VALUES = np.stack([TABLE[np.arange(256) & 15], TABLE[np.arange(256) >> 4]])
# Field of Nf4Array -> name of its tensor in a network and in a checkpoint, after the path of its cell.
TENSOR_NAMES = {"codes": "weight", "absmax": "weight_absmax", "scales": "weight_scales", "offsets": "weight_offsets"}
_WEIGHT = TENSOR_NAMES["codes"]
_MIDPOINTS = (TABLE[:-1] + TABLE[1:]) / 2
# How many numbers are quantized at a time, so that temporary arrays stay small.
_AT_ONCE = 1 << 18


@dataclasses.dataclass(frozen=True)
class Nf4Array:
    """A quantized [N, K] weight; blocks = ceil(K / 64), groups = ceil(N * blocks / 256).

    Attributes:
        codes (ndarray): uint8 [N, blocks * 32]. Byte i of a block's 32 holds the code of its weight i in the low half
            and of weight 32 + i in the high one. A code is an index of TABLE.
        absmax (ndarray): uint8 [N, blocks], the code of the largest absolute value of each block.
        scales (ndarray): float32 [groups]. Groups are runs of 256 blocks, row after row, or of fewer: see by_row.
        offsets (ndarray): float32 [groups]. The absmax of a block is offset + scale * code.
        shape (tuple): (N, K).
    """

    codes: np.ndarray
    absmax: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray
    shape: Tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the four tensors."""
        return self.codes.nbytes + self.absmax.nbytes + self.scales.nbytes + self.offsets.nbytes


def quantize(weight: np.ndarray, name: str = "weight") -> Nf4Array:
    r"""Quantizes a weight: each number becomes absmax' * TABLE[code], with the nearest code.

    absmax' is the absmax of the number's block of 64 after its own quantization to 8 bits, between the least and the
    largest absmax of a group of 256 blocks. Codes are chosen for absmax', not for absmax, so that the error of the
    second quantization does not add to that of the first.

    Args:
        weight (ndarray): Shape [N, K], any N and K of at least 1; float16, float32 or float64.
        name (str): The name of the weight in errors. Default: "weight".

    Returns:
        Nf4Array. The last block of a row is padded if K is not a multiple of 64.

    Raises:
        QuantizationError: The weight is not a matrix of floating-point numbers, is empty, or holds infinity or NaN.

    Source: Dettmers et al., QLoRA, 2023: NF4 and double quantization.
    """
    weight = np.asarray(weight)
    if weight.ndim != 2 or weight.dtype not in (np.float16, np.float32, np.float64) or not weight.size:
        raise QuantizationError(
            f"{name} is {weight.dtype}{list(weight.shape)}: it must be a matrix of float16, float32 or float64 that is "
            "not empty."
        )
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    step = max(1, _AT_ONCE // columns)
    exact = np.empty((rows, blocks), np.float32)
    for start in range(0, rows, step):
        exact[start : start + step] = _absmax(weight[start : start + step], blocks)
    if not np.isfinite(exact).all():
        row = int(np.flatnonzero(~np.isfinite(exact).all(axis=1))[0])
        raise QuantizationError(
            f"{name} holds infinity, NaN or numbers that float32 cannot hold, the first in row "
            f"{row}: leave the cell out (quantize_exclude), or correct the base."
        )
    absmax, scales, offsets = _quantize_absmax(exact)
    back = dequantize_absmax(absmax, scales, offsets)
    codes = np.empty((rows, blocks * BLOCK // 2), np.uint8)
    for start in range(0, rows, step):
        codes[start : start + step] = _encode(weight[start : start + step], back[start : start + step])
    return Nf4Array(codes, absmax, scales, offsets, (rows, columns))


def dequantize(array: Nf4Array, rows: slice = slice(None)) -> np.ndarray:
    r"""W = absmax' * TABLE[codes].

    Args:
        array (Nf4Array): The quantized weight.
        rows (slice): Which rows of W. Default: all.

    Returns:
        ndarray, float32 [N, K], or those rows of it.
    """
    back = dequantize_absmax(array.absmax, array.scales, array.offsets, rows)
    weight = np.empty((*back.shape, 2, BLOCK // 2), np.float32)
    codes = array.codes[rows].reshape(*back.shape, BLOCK // 2)
    for half, pairs in enumerate(BYTE_VALUES):
        np.multiply(pairs[codes], back[:, :, None], out=weight[:, :, half])
    return np.ascontiguousarray(weight.reshape(len(back), -1)[:, : array.shape[1]])


def repacked(weight: np.ndarray) -> Optional[Nf4Array]:
    """Returns the Nf4Array that decodes to the bits of ``weight``, or None if there is none.

    A weight that another library packed in NF4, in blocks of 64 numbers of a row, has one. Its absmax are
    float32 numbers, which 256 steps of a group cannot hold exactly, so each block is a group: its offset is the
    absmax, its scale 0. It takes 5.13 bits per number.

    Args:
        weight (ndarray): float32 [N, K].
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        return None
    exact = _absmax(weight, columns // BLOCK)
    zeros = np.zeros(exact.size, np.float32)
    array = Nf4Array(_encode(weight, exact), np.zeros(exact.shape, np.uint8), zeros, exact.reshape(-1), (rows, columns))
    return array if np.array_equal(dequantize(array), weight) else None


def repacked_layout(rows: int, columns: int) -> Dict[str, Tuple[Tuple[int, ...], np.dtype]]:
    """Returns the ``layout`` of an array that ``repacked`` returns."""
    groups = (rows * columns // BLOCK,), np.dtype(np.float32)
    return {**layout(rows, columns), "scales": groups, "offsets": groups}


def layout(rows: int, columns: int) -> Dict[str, Tuple[Tuple[int, ...], np.dtype]]:
    """Returns field of Nf4Array -> (shape, dtype) for a weight [rows, columns]."""
    blocks = -(-columns // BLOCK)
    groups = (-(-rows * blocks // GROUP),)
    return {
        "codes": ((rows, blocks * BLOCK // 2), np.dtype(np.uint8)),
        "absmax": ((rows, blocks), np.dtype(np.uint8)),
        "scales": (groups, np.dtype(np.float32)),
        "offsets": (groups, np.dtype(np.float32)),
    }


def tensor_name(weight: str, field: str) -> str:
    """Returns the tensor name of a field of Nf4Array; the codes are stored under the weight's own name."""
    return weight + TENSOR_NAMES[field][len(_WEIGHT) :]


def split_name(name: str) -> Tuple[str, str]:
    """Splits a tensor's name into its weight's name and the suffix of its field, "" for the codes."""
    ends = (tensor_name("", field) for field in TENSOR_NAMES if field != "codes")
    end = next((end for end in ends if name.endswith(end)), "")
    return name[: len(name) - len(end)], end


def dequantize_absmax(
    absmax: np.ndarray, scales: np.ndarray, offsets: np.ndarray, rows: slice = slice(None)
) -> np.ndarray:
    """absmax' [N, blocks] = offset + scale * code, or rows of it, with the scale and offset of the block's group."""
    begin, end, _ = rows.indices(len(absmax))
    blocks = absmax.shape[1]
    group = np.arange(begin * blocks, end * blocks) // group_size(absmax.size, len(scales))
    group = group.reshape(-1, blocks)
    return offsets[group] + scales[group] * absmax[rows]


def group_size(blocks: int, groups: int) -> int:
    """Returns the largest group size, a power of two up to 256, that cuts ``blocks`` into ``groups``; 0 for none."""
    size = GROUP
    while size and -(-blocks // size) != groups:
        size //= 2
    return size


def by_row(of_groups: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """Returns the scales or offsets of groups that do not cross rows: [rows, groups of a row].

    Each group is split into several with its scale and offset, so that rows can be taken out of a weight: their decoded
    values stay the same to the last bit.

    Args:
        of_groups (ndarray): [groups].
        rows, blocks (int): Rows of the weight, and blocks of each row.
    """
    of_weight = group_size(rows * blocks, len(of_groups))
    first = np.arange(0, rows * blocks, math.gcd(blocks, of_weight))
    return of_groups[first // of_weight].reshape(rows, -1)


def _blocked(weight: np.ndarray, blocks: int) -> np.ndarray:
    """Returns float32 [N, blocks, 64], padded with zeros."""
    with np.errstate(over="ignore"):
        weight = weight.astype(np.float32, copy=False)
    padding = blocks * BLOCK - weight.shape[1]
    if padding:
        weight = np.pad(weight, [(0, 0), (0, padding)])
    return weight.reshape(len(weight), blocks, BLOCK)


def _absmax(weight: np.ndarray, blocks: int) -> np.ndarray:
    """Returns the largest absolute value of each block, or NaN for a block that holds one."""
    blocked = _blocked(weight, blocks)
    return np.maximum(blocked.max(axis=2), -blocked.min(axis=2))


def _quantize_absmax(absmax: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (codes, scales, offsets), with 256 equal steps from the least to the largest absmax of a group."""
    groups = -(-absmax.size // GROUP)
    # Padding with the last value changes neither the least nor the largest of its group.
    padded = np.pad(absmax.reshape(-1), (0, groups * GROUP - absmax.size), mode="edge").reshape(groups, GROUP)
    offsets = padded.min(axis=1)
    scales = (padded.max(axis=1) - offsets) / np.float32(255)
    steps = np.where(scales > 0, scales, np.float32(1))[:, None]
    codes = np.rint((padded - offsets[:, None]) / steps).clip(0, 255).astype(np.uint8)
    return codes.reshape(-1)[: absmax.size].reshape(absmax.shape), scales, offsets


def _encode(weight: np.ndarray, absmax: np.ndarray) -> np.ndarray:
    """Returns each number's nearest code, two to a byte; a code counts the midpoints of TABLE below the number."""
    blocked = _blocked(weight, absmax.shape[1])
    codes = np.zeros(blocked.shape, np.uint8)
    # All numbers in a block of zeros get the code of zero.
    absmax = np.where(absmax > 0, absmax, np.float32(1))
    for midpoint in _MIDPOINTS:
        codes += blocked > (midpoint * absmax)[:, :, None]
    return (codes[:, :, : BLOCK // 2] | codes[:, :, BLOCK // 2 :] << 4).reshape(len(weight), -1)
