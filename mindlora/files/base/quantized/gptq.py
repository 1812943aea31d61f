"""GPTQ's weights: W[n, k] = (code[k, n] - zero[group of k, n]) * scale[group of k, n], in 2, 3, 4 or 8 bits.

qweight packs the codes along in_channels, qzeros the zeros along out_channels. Files of version 1, which are most, hold
zero - 1; those of checkpoint_format gptq_v2 hold the zero. With desc_act the columns of a group are not adjacent: g_idx
has the group of each column.

Sources: Frantar et al., GPTQ, 2023; the layouts are AutoGPTQ's and GPTQModel's.

AWQ's weights, below, have GPTQ's tensors and settings in another order.
"""

import functools
import re
from typing import Any, List, Mapping, Optional, Sequence

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import FLOATS, to_float32
from mindlora.core.text import shown
from mindlora.files.base.quantized.stored import Integers, PackedWeight, StoredTensors, as_signed, unpacked, words_for

QWEIGHT = ".qweight"
INT32 = np.dtype("<i4")
_BITS = (2, 3, 4, 8)
# checkpoint_format -> the number to add to a stored zero.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


def weights(stored: StoredTensors, settings: Mapping[str, Any]) -> List[PackedWeight]:
    """Returns the weights in GPTQ; ``settings`` has bits, group_size, checkpoint_format and dynamic.

    Raises CheckpointError, naming the setting or the tensor, if they cannot be decoded.
    """
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    _check_choice(stored, "checkpoint_format", version, tuple(_ZERO_OFFSETS))
    made = []
    for name in stored.tensors:
        if name.endswith(QWEIGHT):
            path = name[: -len(QWEIGHT)]
            own = settings_of(stored, settings, path)
            bits: Any = own.get("bits")
            _check_choice(stored, "bits", bits, _BITS)
            if own.get("desc_act"):
                stored.part(name, f"{path}.g_idx")
            made.append(_weight(stored, path, int(bits), group_size(stored, own), _ZERO_OFFSETS[version]))
    return made


def _check_choice(stored: StoredTensors, key: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise CheckpointError(
            f"{stored.path} is in GPTQ with {key} {value!r}, and {', '.join(map(str, choices))} can be read. Take the "
            "original model, or save it again with GPTQModel."
        )


def settings_of(stored: StoredTensors, settings: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Returns the settings of one weight, which the first matching pattern of GPTQModel's dynamic may change.

    A pattern is a regular expression on the beginning of a path, after "+:" or nothing; after "-:", matches are in
    float.
    """
    dynamic = settings.get("dynamic") or {}
    try:
        for pattern, others in dynamic.items():
            if re.match(pattern[2:] if pattern[:2] in ("+:", "-:") else pattern, path):
                return {**settings, **others}
    except (AttributeError, TypeError, re.error) as error:
        raise CheckpointError(
            f"{stored.path}: dynamic of its quantization is {shown(dynamic)}, which is not an object of regular "
            f"expressions and settings ({error}). Copy config.json again."
        ) from error
    return settings


def group_size(stored: StoredTensors, settings: Mapping[str, Any]) -> Optional[int]:
    """Returns the number of columns that share a scale; None for all of them."""
    size = settings.get("group_size", settings.get("q_group_size", -1))
    if type(size) is not int or size == 0 or size < -1:
        raise CheckpointError(
            f"{stored.path}: group_size of its quantization is {size!r}, which is neither -1 nor a whole number of at "
            "least 1. Copy config.json again."
        )
    return None if size == -1 else size


def groups_of(stored: StoredTensors, name: str, columns: int, size: Optional[int]) -> int:
    """Returns the number of groups of ``columns``; raises CheckpointError if ``size`` does not divide them."""
    if size is not None and columns % size:
        raise CheckpointError(
            f"{stored.path}: {name} has {columns} in_channels, which group_size {size} does not divide. Copy the model "
            "and its config.json again."
        )
    return columns // (size or columns)


def _weight(stored: StoredTensors, path: str, bits: int, size: Optional[int], offset: int) -> PackedWeight:
    names = (f"{path}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx", "bias"))
    qweight, qzeros, scales, g_idx, bias = names
    words, rows = stored.matrix(qweight)
    columns = words * 32 // bits
    groups = groups_of(stored, qweight, columns, size)
    why = f"{qweight} in {bits} bits"
    stored.check(qweight, [(words_for(columns, bits), rows)], [INT32], why)
    stored.part(qweight, qzeros)
    stored.part(qweight, scales)
    stored.check(qzeros, [(groups, words_for(rows, bits))], [INT32], why)
    stored.check(scales, [(groups, rows)], FLOATS, why)
    parts = [qweight, qzeros, scales]
    order = None
    if g_idx in stored.tensors:
        parts.append(g_idx)
        order = group_order(stored, g_idx, columns, groups, why)
    if bias in stored.tensors and not to_float32(stored.read(bias)).any():
        # Some programs give each cell a bias, of zeros if the model has none.
        parts.append(bias)

    def read_codes(begin: int, end: int) -> np.ndarray:
        codes = unpacked(stored.read_columns(qweight, begin, end).T, bits, columns)
        return as_signed(codes) if bits == 8 else codes

    def read_zeros(begin: int, end: int) -> np.ndarray:
        # Zeros are packed along the rows: every 32 of them begin a word.
        first = begin // 32 * 32
        read = stored.read_columns(qzeros, first * bits // 32, words_for(end, bits))
        zeros = unpacked(read, bits, end - first)[:, begin - first :]
        zeros = (zeros + np.uint8(offset) & np.uint8((1 << bits) - 1)).T
        return as_signed(zeros) if bits == 8 else zeros

    def read_scales(begin: int, end: int) -> np.ndarray:
        return stored.read_columns(scales, begin, end).T

    form = f"GPTQ in {bits} bits" + (" with desc_act" if order is not None else "")
    integers = Integers(bits, groups, stored.tensors[scales].dtype, read_codes, read_zeros, read_scales, order)
    return integers.as_weight(f"{path}.weight", (rows, columns), tuple(parts), form)


def group_order(stored: StoredTensors, name: str, columns: int, groups: int, why: str) -> Optional[np.ndarray]:
    """Returns the group of each column, from the tensor ``name``; None if groups are adjacent columns in order."""
    stored.check(name, [(columns,)], [INT32], why)
    order = stored.read(name)
    if order.min() < 0 or order.max() >= groups:
        raise CheckpointError(
            f"{stored.path}: {name} has groups {order.min()} to {order.max()}, and {why} has {groups} groups. Copy the "
            "model again."
        )
    in_turn = np.array_equal(order, np.arange(columns) // (columns // groups))
    return None if in_turn else order


# AWQ: W[n, k] = (code[k, n] - zero[group of k, n]) * scale[group of k, n], in 4 bits
#
# A word has the codes of eight out_channels, in the order 0, 2, 4, 6, 1, 3, 5, 7.
#
# Sources: Lin et al., AWQ, 2023; the layout is AutoAWQ's, version gemm.


# The place in a word of each of its eight channels.
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
_AWQ_BITS, _IN_WORD = 4, 8


def awq_weights(stored: StoredTensors, settings: Mapping[str, Any]) -> List[PackedWeight]:
    """Returns the awq_weights in AWQ; ``settings`` has bits (or w_bit), group_size (or q_group_size) and version.

    Raises CheckpointError, naming the setting or the tensor, if they cannot be decoded.
    """
    bits = settings.get("bits", settings.get("w_bit", _AWQ_BITS))
    version = str(settings.get("version", "gemm")).lower()
    for key, value, readable in (("bits", bits, _AWQ_BITS), ("version", version, "gemm")):
        if value != readable:
            raise CheckpointError(
                f"{stored.path} is in AWQ with {key} {value!r}, and {readable} can be read. Take the original "
                "model, or one in the version gemm."
            )
    paths = [name[: -len(QWEIGHT)] for name in stored.tensors if name.endswith(QWEIGHT)]
    return [_awq_weight(stored, path, group_size(stored, settings_of(stored, settings, path))) for path in paths]


def _awq_weight(stored: StoredTensors, path: str, size: Optional[int]) -> PackedWeight:
    qweight, qzeros, scales = (f"{path}.{part}" for part in ("qweight", "qzeros", "scales"))
    columns, words = stored.matrix(qweight)
    rows = words * _IN_WORD
    groups = groups_of(stored, qweight, columns, size)
    stored.check(qweight, [(columns, words)], [INT32], path)
    stored.part(qweight, qzeros)
    stored.part(qweight, scales)
    stored.check(qzeros, [(groups, words)], [INT32], qweight)
    stored.check(scales, [(groups, rows)], FLOATS, qweight)

    def channels(name: str, begin: int, end: int) -> np.ndarray:
        """Returns the codes of out_channels [begin, end): uint8 [end - begin, rows of the tensor]."""
        first, last = begin // _IN_WORD, -(-end // _IN_WORD)
        in_words = unpacked(stored.read_columns(name, first, last), _AWQ_BITS, (last - first) * _IN_WORD)
        in_turn = in_words.reshape(-1, last - first, _IN_WORD)[:, :, _PLACES].reshape(len(in_words), -1)
        return in_turn[:, begin - first * _IN_WORD : end - first * _IN_WORD].T

    integers = Integers(
        _AWQ_BITS,
        groups,
        stored.tensors[scales].dtype,
        lambda begin, end: np.ascontiguousarray(channels(qweight, begin, end)),
        functools.partial(channels, qzeros),
        lambda begin, end: stored.read_columns(scales, begin, end).T,
    )
    return integers.as_weight(f"{path}.weight", (rows, columns), (qweight, qzeros, scales), "AWQ in 4 bits")
