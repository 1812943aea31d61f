"""Frobenius norms of pairs, computed from A and B only.

The change of a weight, scale B A, is [out, in] and is never formed: two [r, r] matrices give its Frobenius norm,
||B A||_F^2 = trace((A A^T) (B^T B)).
"""

import math
from typing import Optional, Tuple

import numpy as np

from mindlora.adapters.adapter import Adapter
from mindlora.numerics.dtypes import to_float32
from mindlora.numerics.pair_layouts import Pair, factors


def delta_norm(*parts: Tuple[float, np.ndarray, np.ndarray]) -> float:
    """Returns the Frobenius norm of the sum of scale B A over ``parts``, each (scale, A [r, in], B [out, r]).

    Pairs of experts are stacks of such matrices, and the norm is over all of them.
    """
    pairs = [(scale, factors(a, b)) for scale, a, b in parts]
    left = np.concatenate([scale * b.astype(np.float64) for scale, (b, _) in pairs], axis=-1)
    right = np.concatenate([a.astype(np.float64) for _, (_, a) in pairs], axis=-2)
    squares = (right @ right.swapaxes(-1, -2)) * (left.swapaxes(-1, -2) @ left)
    # If the terms cancel, rounding may leave a square just below zero.
    return math.sqrt(max(0.0, float(squares.sum())))


def finite_norm(array: np.ndarray) -> Optional[float]:
    """Returns the Frobenius norm of ``array``, or None if it is not finite."""
    norm = float(np.linalg.norm(array if array.dtype == np.float64 else to_float32(array).astype(np.float64)))
    return norm if math.isfinite(norm) else None


def quiet_pair(adapter: Adapter, path: str) -> Pair:
    """Returns ``adapter.pair(path)`` without NumPy's warnings; what is not finite shows in its norm."""
    with np.errstate(invalid="ignore", over="ignore"):
        return adapter.pair(path)
