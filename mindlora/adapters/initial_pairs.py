"""Initial pairs: the A0 and B0 whose product an initializer such as PiSSA subtracts from the base.

With W' = W - scale B0 A0 in place of W, W' x + scale B A x = W x + scale [B, -B0] [A; A0] x: what is trained on W' is a
plain LoRA of twice the rank on W.
"""

import math
from typing import Callable

import numpy as np

from mindlora.adapters.adapter import Adapter
from mindlora.adapters.pair_kinds import LINEAR
from mindlora.numerics import initializers
from mindlora.numerics.dtypes import from_float32, to_float32


def append(adapter: Adapter, path: str, a: np.ndarray, b: np.ndarray) -> None:
    """Makes the pair at ``path``, for the changed base, one for the original base: [A; A0] and [B, -B0].

    Args:
        adapter (Adapter): Changed in place; the scale stays the same.
        path (str): Path of the cell.
        a, b (array): A0 [r, in] and B0 [out, r].
    """
    own = [adapter.tensors[path, half] for half in "AB"]
    if any(mine.dtype != initial.dtype for mine, initial in zip(own, (a, b))):
        own, a, b = [to_float32(array) for array in own], to_float32(a), to_float32(b)
    adapter.tensors[path, "A"] = np.concatenate([own[0], a])
    adapter.tensors[path, "B"] = np.concatenate([own[1], negative(b)], axis=1)
    adapter.alphas[path] *= growth(adapter.use_rslora)


def complete(adapter: Adapter, weight_of: Callable[[str], np.ndarray]) -> None:
    """Makes a plain LoRA of an adapter that PEFT saved as PiSSA or OLoRA trained it; does nothing to any other.

    As PEFT does when it loads one, the initial pairs are computed again from the base, in float32. Only linear cells
    have them.

    Args:
        adapter (Adapter): Changed in place.
        weight_of (callable): Takes a path; returns the base's weight [out, in], float32.

    Raises:
        ConfigError: A rank is larger than a side of the weight.
    """
    name = adapter.initializer
    if name is None:
        return
    for path in adapter.paths:
        if adapter.layout(path) is LINEAR:
            rank, scale = adapter.rank(path), adapter.scale(path)
            append(adapter, path, *initializers.of_base(name, weight_of(path), rank, scale))
    adapter.initializer, adapter.initialization = None, name


def negative(array: np.ndarray) -> np.ndarray:
    """Returns -array in its dtype."""
    return from_float32(-to_float32(array), array.dtype)


def growth(use_rslora: bool) -> float:
    """Returns the factor on lora_alpha that keeps the scale at twice the rank."""
    return math.sqrt(2) if use_rslora else 2
