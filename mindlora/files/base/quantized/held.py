"""Weights held in their own bits: a checkpoint's integers, as the tensors that hold a weight.

mindlora.core.numerics.integers describes these tensors. Each has a row per row of the weight, so joining or renaming
weights applies to them as well.
"""

from typing import Dict, Iterable, Mapping

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import FLOATS, to_float32
from mindlora.core.numerics.integers import BITS, BLOCK, HALF, IntegerForm, pack
from mindlora.core.text import examples
from mindlora.files.base.quantized.stored import Integers, PackedWeight

_SCALES = FLOATS[1:]
ADVICE = (
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
            f"{ADVICE}"
        )


def form_of(integers: Integers) -> IntegerForm:
    """Returns the form in which a weight is held."""
    return IntegerForm(integers.bits, integers.groups, integers.dtype)


def rows_of(weight: PackedWeight, field: str, begin: int, end: int) -> np.ndarray:
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
            f"{limits[1]} can be held. {ADVICE}"
        )
    return np.ascontiguousarray(np.broadcast_to(rounded.view(np.uint8), (count, integers.groups)))
