"""The sources of decoding: the tensors stored in a checkpoint's files, and packed codes.

Codes of a few bits are packed one after the other, the first in the lowest bits.
"""

from typing import Callable, Dict, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.formats.safetensors_file import TensorFile, TensorInfo
from mindlora.core.numerics.dtypes import FLOATS, dtype_name, to_float32
from mindlora.core.numerics.integers import BITS, BLOCK, HALF, IntegerForm, pack
from mindlora.core.text import examples

Shape = Tuple[int, ...]


class PackedWeight(NamedTuple):
    """A weight of a linear cell that is stored in few bits.

    Attributes:
        name (str): Its name when it is not packed, such as model.layers.0.self_attn.q_proj.weight.
        shape (tuple): [out_channels, in_channels].
        parts (tuple of str): The tensors that store it.
        form (str): Its form, for reports.
        rows (callable): (begin, end) -> the decoded rows, float32. Several threads call it at once.
        nf4 (bool): Whether mindlora's own NF4 can have its blocks: see nf4.repacked.
        integers (Integers or None): Its integers, if it consists of integers.
    """

    name: str
    shape: Shape
    parts: Tuple[str, ...]
    form: str
    rows: Callable[[int, int], np.ndarray]
    nf4: bool = False
    integers: Optional["Integers"] = None


class Integers(NamedTuple):
    """The integers of a weight: W = (code - zero) * scale, with the zero and scale of each column's group.

    Attributes:
        bits (int): Bits of a code.
        groups (int): Number of groups of columns, each with its own scale and zero.
        dtype (dtype): The stored dtype of the scales.
        codes (callable): (begin, end) -> integers [rows, columns] of these rows; those of 8 bits are signed.
        zeros (callable): (begin, end) -> numbers [rows, groups], or [1, 1] for a single one.
        scales (callable): (begin, end) -> [rows, groups], or [1, 1] for a single one.
        order (ndarray or None): The group of each column; None if groups are adjacent columns in order.
    """

    bits: int
    groups: int
    dtype: np.dtype
    codes: Callable[[int, int], np.ndarray]
    zeros: Callable[[int, int], np.ndarray]
    scales: Callable[[int, int], np.ndarray]
    order: Optional[np.ndarray] = None

    def decoded(self, begin: int, end: int) -> np.ndarray:
        """Returns these rows, decoded, in float32."""
        zeros = self.zeros(begin, end).astype(np.float32)
        return from_groups(self.codes(begin, end), zeros, to_float32(self.scales(begin, end)), self.order)

    def as_weight(self, name: str, shape: Shape, parts: Tuple[str, ...], form: str) -> PackedWeight:
        """Returns the PackedWeight made of these integers."""
        return PackedWeight(name, shape, parts, form, self.decoded, integers=self)


class StoredTensors:
    """The tensors of safetensors files, with checks that name the fault.

    Args:
        path (str): The checkpoint, for errors.
        files (mapping): Name of a file -> the open file.
        file_of (mapping): Name of a tensor -> name of its file.

    Attributes:
        tensors (dict): Name -> TensorInfo.
    """

    def __init__(self, path: str, files: Mapping[str, TensorFile], file_of: Mapping[str, str]):
        self.path = path
        self._files = {name: files[file] for name, file in file_of.items()}
        self.tensors: Dict[str, TensorInfo] = {name: file.tensors[name] for name, file in self._files.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in its stored form."""
        return self._files[name].read(name)

    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Returns rows [begin, end) of a tensor."""
        return self._files[name].read_rows(name, begin, end)

    def read_columns(self, name: str, begin: int, end: int) -> np.ndarray:
        """Returns columns [begin, end) of a matrix."""
        return self._files[name].read_columns(name, begin, end)

    def part(self, weight: str, *names: str) -> TensorInfo:
        """Returns the first of ``names`` that exists; raises CheckpointError if ``weight`` lacks them all."""
        there = [name for name in names if name in self.tensors]
        if not there:
            raise CheckpointError(
                f"{self.path} holds {weight} and lacks {' or '.join(names)}, without which it cannot be decoded. Copy "
                "the model again."
            )
        return self.tensors[there[0]]

    def matrix(self, name: str) -> Tuple[int, int]:
        """Returns the shape of a tensor; raises CheckpointError unless it has two axes, both above 0."""
        shape = self.tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{self.path}: {name} is {list(shape)}, which is not a matrix. Copy the model again.")
        return shape[0], shape[1]

    def check(self, name: str, shapes: Sequence[Shape], dtypes: Sequence[np.dtype], why: str) -> None:
        """Raises CheckpointError unless a tensor has one of the shapes and dtypes; ``why`` says what requires them."""
        info = self.tensors[name]
        if info.shape in shapes and info.dtype in dtypes:
            return
        stated = " or ".join(dict.fromkeys(map(dtype_name, dtypes)))
        sizes = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
        raise CheckpointError(
            f"{self.path}: {name} is {dtype_name(info.dtype)} {list(info.shape)}, and {why} needs it as {stated} "
            f"{sizes}. Copy the model again."
        )


def _bytes_apart(bits: int) -> np.ndarray:
    """Returns uint8 [256, 8 / bits]: the codes in each byte."""
    return (np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1).astype(np.uint8)


# Bits that divide 8 -> the codes in each byte.
_CODES_OF_BYTE = {bits: _bytes_apart(bits) for bits in (1, 2, 4)}


def words_for(count: int, bits: int) -> int:
    """Returns the number of 32-bit words that hold ``count`` codes."""
    return -(-count * bits // 32)


def unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the first ``count`` codes of each row.

    Args:
        words (ndarray): int32 [rows, words]; if ``bits`` does not divide 32, codes continue in the next word.
        bits (int): Bits of a code, 1 to 8.
        count (int): Number of codes in a row.

    Returns:
        ndarray, uint8 [rows, count].
    """
    in_bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return in_bytes[:, :count]
    if bits in _CODES_OF_BYTE:
        return _CODES_OF_BYTE[bits][in_bytes].reshape(len(words), -1)[:, :count]
    # Eight codes take as many bytes as a code has bits.
    in_bytes = np.pad(in_bytes, [(0, 0), (0, -in_bytes.shape[1] % bits)])
    eight = np.zeros((len(words), in_bytes.shape[1] // bits), np.uint64)
    for index in range(bits):
        eight |= in_bytes[:, index::bits].astype(np.uint64) << np.uint64(8 * index)
    codes = eight[:, :, None] >> (np.arange(8, dtype=np.uint64) * np.uint64(bits)) & np.uint64((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]


def as_signed(codes: np.ndarray) -> np.ndarray:
    """Returns 8-bit codes minus 128 as int8, which flips their highest bit."""
    return (codes ^ np.uint8(128)).view(np.int8)


def from_groups(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: Optional[np.ndarray] = None
) -> np.ndarray:
    """W = (codes - zeros) * scales, with the zero and scale of each column's group.

    Args:
        codes (ndarray): Integers [rows, columns].
        zeros (ndarray): float32 [rows, groups], or [1, 1] for a single one.
        scales (ndarray): float32 [rows, groups].
        group_of (ndarray): Integers [columns], the group of each column. Default: None, adjacent groups of equal size.

    Returns:
        ndarray, float32 [rows, columns].
    """
    decoded = codes.astype(np.float32)
    if group_of is not None:
        decoded -= zeros[:, group_of] if zeros.shape[1] > 1 else zeros
        decoded *= scales[:, group_of]
        return decoded
    in_groups = decoded.reshape(len(codes), scales.shape[1], -1)
    in_groups -= zeros[:, :, None]
    in_groups *= scales[:, :, None]
    return decoded


# Weights held in their own bits: a checkpoint's integers, as the tensors that hold a weight
#
# mindlora.core.numerics.integers describes these tensors. Each has a row per row of the weight, so joining or renaming
# weights applies to them as well.


_SCALES = FLOATS[1:]
HOLD_ADVICE = (
    "Leave quantize_base (--quantize-base) out, and the weights are decoded to the network's dtype; or quantize them "
    "once (mindlora base quantize) and set quantize_base: nf4."
)


def why_not_held(weight: PackedWeight) -> str:
    """Returns the reason why the operator integer_linear cannot hold a weight in its own bits, or ""."""
    integers, columns = weight.integers, weight.shape[1]
    if integers is None or integers.bits not in BITS:
        return f"it is in {weight.form}, but only integers of 4 or 8 bits can be held"
    if integers.order is not None:
        return "its groups are not in the order of its columns (desc_act)"
    if columns % BLOCK:
        return f"a row has {columns} numbers, but only a multiple of {BLOCK} can be held"
    if columns // integers.groups % HALF:
        return f"its groups have {columns // integers.groups} columns, but only a multiple of {HALF} can be held"
    if integers.dtype not in _SCALES:
        return f"its scales are {integers.dtype}"
    return ""


def check_held(path: str, weights: Mapping[str, PackedWeight], names: Iterable[str]) -> None:
    """Raises CheckpointError, with the reasons, if any of the weights ``names`` cannot be held in its own bits."""
    reasons: Dict[str, list] = {}
    for name in names:
        reason = why_not_held(weights[name])
        if reason:
            reasons.setdefault(reason, []).append(name)
    if reasons:
        found = "; ".join(f"{examples(alike)}: {reason}" for reason, alike in reasons.items())
        raise CheckpointError(
            f"{path}: quantize_base (--quantize-base) is as_stored, but not all weights can be held so. {found}. "
            f"{HOLD_ADVICE}"
        )


def held_form(integers: Integers) -> IntegerForm:
    """Returns the form in which a weight is held."""
    return IntegerForm(integers.bits, integers.groups, integers.dtype)


def held_rows(weight: PackedWeight, field: str, begin: int, end: int) -> np.ndarray:
    """Returns rows [begin, end) of a tensor that holds a weight: its "codes", "zeros" or "scales"."""
    integers = weight.integers
    assert integers is not None
    count = end - begin
    if field == "codes":
        return pack(integers.codes(begin, end), integers.bits)
    if field == "scales":
        return np.ascontiguousarray(np.broadcast_to(integers.scales(begin, end), (count, integers.groups)))
    zeros = integers.zeros(begin, end)
    whole = to_float32(zeros) if zeros.dtype.kind not in "iu" else zeros
    limits = (-128, 127) if integers.bits == 8 else (0, 255)
    rounded = whole.astype(np.int8 if integers.bits == 8 else np.uint8)
    if not np.array_equal(rounded, whole):
        raise CheckpointError(
            f"{weight.name} has zeros from {whole.min()} to {whole.max()}, but only whole ones from {limits[0]} to "
            f"{limits[1]} can be held. {HOLD_ADVICE}"
        )
    return np.ascontiguousarray(np.broadcast_to(rounded.view(np.uint8), (count, integers.groups)))
