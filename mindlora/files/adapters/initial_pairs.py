"""Initial pairs: the A0 and B0 whose product an initializer such as PiSSA subtracts from the base.

With W' = W - scale B0 A0 in place of W, W' x + scale B A x = W x + scale [B, -B0] [A; A0] x: a pair trained on W' is a
plain LoRA of twice the rank on W.
"""

from typing import Callable, Collection, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core.errors import LoraError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import from_float32, scaled, to_float32
from mindlora.core.numerics.pair_shapes import LINEAR
from mindlora.files.adapters import joined_pairs
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.expert_pairs import is_single
from mindlora.models import names
from mindlora.models.architectures.joined_rows import RowLayout


class Base(NamedTuple):
    """The weights of the linear cells of a base, some of which may be joined (w_qkv), under MindFormers' paths.

    Attributes:
        weight_of (callable): Takes a path; returns its weight [out, in], float32.
        rows_of (callable): Takes the path of a joined cell or of its part; returns the number of key-value heads
            and the joined cell's order of rows; None if unknown, or as in its record.
    """

    paths: Collection[str]
    weight_of: Callable[[str], np.ndarray]
    rows_of: Callable[[str], Tuple[Optional[int], Optional[RowLayout]]]


def append(adapter: Adapter, path: str, a: np.ndarray, b: np.ndarray) -> None:
    """Turns the pair at ``path``, for the changed base, into one for the original base, [A; A0] and [B, -B0], in place.

    Its scale stays the same. Where lora_alpha is unknown, B is rescaled instead.
    """
    arrays = [adapter.tensors[path, "A"], a, adapter.tensors[path, "B"], b]
    if arrays[0].dtype != a.dtype or arrays[2].dtype != b.dtype:
        arrays = list(map(to_float32, arrays))
    adapter.tensors[path, "A"] = np.concatenate(arrays[:2])
    adapter.tensors[path, "B"] = np.concatenate([arrays[2], negative(arrays[3])], axis=1)
    if path in adapter.alphas:
        adapter.alphas[path] *= adapter.alpha_growth(2)
    else:
        adapter.tensors[path, "B"] = scaled(adapter.tensors[path, "B"], adapter.alpha_growth(2))


def complete(adapter: Adapter, base: Base) -> None:
    """Converts an adapter that PEFT saved as PiSSA, OLoRA or KaSA trained it to plain LoRA; leaves others alone.

    As when PEFT loads one, the initial pairs are computed again from the base, in float32. Only linear cells
    have them, except cells whose own, changed weight is in the file (an adapted output head). Pairs for
    which the base has no weight, or one of another shape, are unchanged: matching refuses them. The adapter's pairs
    must not be joined or split yet.

    Raises LoraError if a weight is not finite, smaller than the rank, or a single expert's where the base has stacks,
    and if the rows of a joined weight cannot be separated.
    """
    name = adapter.initializer
    if name is None:
        return
    joined = {part: path for path in base.paths for part in names.joined_parts(path)}
    for path in adapter.paths:
        if adapter.layout(path) is not LINEAR or f"{path}.weight" in adapter.saved_modules:
            continue
        weight = _weight_of(base, adapter, path, joined.get(path))
        if weight is None or weight.shape != adapter.weight_shape(path):
            continue
        if not np.isfinite(weight).all():
            raise LoraError(
                f"The weight of {path or 'the cell'} holds NaN or infinity, so the initial pairs of {name!r} cannot be "
                "computed from it. Take another copy of the base."
            )
        append(adapter, path, *initializers.of_base(name, weight, adapter.rank(path), adapter.scale(path)))
    adapter.initializer = None
    # The initializer that mindlora would train; it has no KaSA.
    adapter.initialization = name if initializers.changes_base(name) else None


def _weight_of(base: Base, adapter: Adapter, path: str, joined: Optional[str]) -> Optional[np.ndarray]:
    """Returns the weight for the pair at ``path``, assembled from rows of other weights where the base stores it so;
    None if the base has no such weight."""
    if path in base.paths:
        return base.weight_of(path)
    if joined:
        return joined_pairs.member_weights(adapter, joined, base.weight_of(joined), *base.rows_of(joined))[path]
    if is_single(path):
        raise LoraError(
            f"{path} was trained with PEFT's {adapter.initializer!r}, whose initial pair follows from the "
            "weight of this expert alone, but the base has no such weight: those of the experts are stacked. Merge the "
            "adapter into Hugging Face's checkpoint, which has them apart."
        )
    parts = names.joined_parts(path)
    if not parts or any(part not in base.paths for part in parts):
        return None
    return joined_pairs.joined_weight(path, list(map(base.weight_of, parts)), base.rows_of(parts[0])[0])


def negative(array: np.ndarray) -> np.ndarray:
    """Returns -array in its dtype."""
    return from_float32(-to_float32(array), array.dtype)
