"""bitsandbytes' weights: 4 bits (NF4, FP4) in blocks of the flattened weight, and 8 bits (LLM.int8) by rows.

4 bits: W = map[code] * absmax of the block, where the first code of a byte is in its high half. With double
quantization, absmax = nested_map[its code] * nested_absmax of its block + nested_offset. 8 bits: W = codes * SCB / 127.

Sources: Dettmers et al., QLoRA, 2023, and LLM.int8(), 2022; bitsandbytes' QuantState.as_dict has the names.
"""

import functools
import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.json_files import parse_object
from mindlora.core.numerics.nf4 import BLOCK, TABLE
from mindlora.files.base.quantized.stored import Integers, PackedWeight, StoredTensors

# Suffix of the tensor that describes a 4-bit weight, after the weight's name.
STATE = ".quant_state.bitsandbytes__"
_KINDS = {"nf4": "NF4", "fp4": "FP4"}
_FLOAT, _BYTE = np.dtype("<f4"), np.dtype("u1")
# 1 / 127 in bitsandbytes' rounding.
_OF_127 = np.float32(7.874015718698502e-3)


class _FourBits(NamedTuple):
    """The description of a weight in 4 bits.

    Attributes:
        pairs (ndarray): float32 [256, 2], the two values of each byte.
        block (int): Numbers that share an absmax.
        absmax (str): Name of the tensor with the absmax, or with their codes.
        nested (ndarray or None): float32 [256], the values of absmax's codes.
        nested_absmax (ndarray or None): float32, the factor for each ``nested_block`` of these values.
        offset (float): The number added after that.
    """

    pairs: np.ndarray
    block: int
    absmax: str
    nested: Optional[np.ndarray] = None
    nested_absmax: Optional[np.ndarray] = None
    nested_block: int = 1
    offset: np.float32 = np.float32(0)


def weights(stored: StoredTensors, settings: Mapping[str, Any]) -> List[PackedWeight]:
    """Returns the weights in 4 and 8 bits; the tensors describe their own packing.

    Raises CheckpointError, naming the tensor, if one is missing or does not suit its weight.
    """
    made = []
    for name, info in stored.tensors.items():
        weight, _, kind = name.partition(STATE)
        if kind:
            made.append(_four_bits(stored, weight, kind))
        elif name.endswith(".weight") and info.dtype == np.int8:
            made.append(_eight_bits(stored, name))
    return made


def _eight_bits(stored: StoredTensors, name: str) -> PackedWeight:
    path = name[: -len(".weight")]
    scb, layout = f"{path}.SCB", f"{path}.weight_format"
    shape = stored.matrix(name)
    stored.part(name, scb)
    stored.check(scb, [(shape[0],)], [_FLOAT], name)
    parts = [name, scb]
    if layout in stored.tensors:
        parts.append(layout)
        if stored.read(layout).any():
            raise CheckpointError(
                f"{stored.path}: {layout} says that {name} has its rows in the order of a GPU's kernel. Save the model "
                "again with a bitsandbytes of at least 0.43, or in bfloat16."
            )

    def rows(begin: int, end: int) -> np.ndarray:
        decoded = stored.read_rows(name, begin, end).astype(np.float32)
        decoded *= stored.read_rows(scb, begin, end)[:, None]
        decoded *= _OF_127
        return decoded

    # Decoding rounds twice, as bitsandbytes does; in held weights, the scale is rounded first.
    integers = Integers(
        8,
        1,
        _FLOAT,
        functools.partial(stored.read_rows, name),
        lambda *_: np.zeros((1, 1), np.int8),
        lambda begin, end: stored.read_rows(scb, begin, end)[:, None] * _OF_127,
    )
    return PackedWeight(name, shape, tuple(parts), "bitsandbytes' 8 bits by rows", rows, integers=integers)


def _four_bits(stored: StoredTensors, name: str, kind: str) -> PackedWeight:
    described = f"{name}{STATE}{kind}"
    content = stored.read(described).tobytes()
    state: Dict[str, Any] = parse_object(content, f"{stored.path}: {described}", CheckpointError)
    shape: Any = state.get("shape")
    block: Any = state.get("blocksize")
    if (
        kind not in _KINDS
        or state.get("quant_type") != kind
        or not _are_counts(shape, 2)
        or not _are_counts([block], 1)
        or name not in stored.tensors
    ):
        raise CheckpointError(
            f"{stored.path}: {described} says {dict(state)}, which does not describe a matrix {name} in nf4 or fp4. "
            "Copy the model again."
        )
    numbers = math.prod(shape)
    codes = stored.tensors[name]
    if codes.size != -(-numbers // 2):
        raise CheckpointError(
            f"{stored.path}: {name} has {codes.size} bytes, and the {shape} that {described} says need "
            f"{-(-numbers // 2)}. Copy the model again."
        )
    parts = [name, f"{name}.absmax", f"{name}.quant_map", described]
    stored.part(name, parts[1])
    stored.part(name, parts[2])
    blocks = -(-numbers // block)
    nested = "nested_blocksize" in state
    stored.check(parts[1], [(blocks,)], [_BYTE if nested else _FLOAT], name)
    stored.check(parts[2], [(16,)], [_FLOAT], name)
    table = stored.read(parts[2])
    bytes_ = np.arange(256)
    packed = _FourBits(np.stack([table[bytes_ >> 4], table[bytes_ & 15]], axis=1), block, parts[1])
    if nested:
        packed = _nested(stored, name, state, packed, blocks)
        parts += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    # mindlora's own NF4 has blocks of 64 that do not cross rows.
    has_blocks = kind == "nf4" and not shape[1] % BLOCK and not block % BLOCK and not shape[1] % block
    return PackedWeight(
        name,
        (shape[0], shape[1]),
        tuple(parts),
        f"bitsandbytes' {_KINDS[kind]}",
        functools.partial(_rows, stored, name, packed, shape[1]),
        has_blocks and table.tobytes() == TABLE.tobytes(),
    )


def _nested(stored: StoredTensors, name: str, state: Mapping[str, Any], packed: _FourBits, blocks: int) -> _FourBits:
    size, offset = state["nested_blocksize"], state.get("nested_offset")
    absmax, table = f"{name}.nested_absmax", f"{name}.nested_quant_map"
    if not _are_counts([size], 1) or not isinstance(offset, (int, float)):
        raise CheckpointError(
            f"{stored.path}: {name}{STATE}{state['quant_type']} says nested_blocksize {size!r} and nested_offset "
            f"{offset!r}, which are not two numbers. Copy the model again."
        )
    stored.part(name, absmax)
    stored.part(name, table)
    stored.check(absmax, [(-(-blocks // size),)], [_FLOAT], name)
    stored.check(table, [(256,)], [_FLOAT], name)
    return packed._replace(
        nested=stored.read(table), nested_absmax=stored.read(absmax), nested_block=size, offset=np.float32(offset)
    )


def _rows(stored: StoredTensors, name: str, packed: _FourBits, columns: int, begin: int, end: int) -> np.ndarray:
    first, last = begin * columns, end * columns
    values = packed.pairs[_bytes(stored, name, first // 2, -(-last // 2))].reshape(-1)
    values = values[first % 2 : first % 2 + last - first]
    block = first // packed.block
    absmax = _absmax(stored, packed, block, -(-last // packed.block))
    if first % packed.block or last % packed.block:
        start = first - block * packed.block
        values *= np.repeat(absmax, packed.block)[start : start + last - first]
    else:
        values.reshape(-1, packed.block)[:] *= absmax[:, None]
    return values.reshape(end - begin, columns)


def _absmax(stored: StoredTensors, packed: _FourBits, begin: int, end: int) -> np.ndarray:
    """Returns the absmax of blocks [begin, end)."""
    absmax = stored.read_rows(packed.absmax, begin, end)
    if packed.nested is None or packed.nested_absmax is None:
        return absmax
    return packed.nested[absmax] * packed.nested_absmax[np.arange(begin, end) // packed.nested_block] + packed.offset


def _bytes(stored: StoredTensors, name: str, begin: int, end: int) -> np.ndarray:
    """Returns bytes [begin, end) of a tensor of any dtype: bnb_4bit_quant_storage names that of the codes."""
    size = stored.tensors[name].dtype.itemsize
    read = stored.read_rows(name, begin // size, -(-end // size)).reshape(-1).view(np.uint8)
    return read[begin % size : begin % size + end - begin]


def _are_counts(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(type(size) is int and size > 0 for size in values)
