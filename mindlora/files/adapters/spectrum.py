"""Norm and singular values of scale B A, computed from A and B alone: how much of its rank an adapter uses.

The change of a weight, scale B A, is [out, in] and is never formed. Two [r, r] matrices give its Frobenius norm,
||B A||_F^2 = trace((A A^T) (B^T B)). With B = Q_b R_b and A^T = Q_a R_a, the svd of the small
scale R_b R_a^T = U S V^T gives scale B A = (Q_b U) S (Q_a V)^T, exactly.
"""

import dataclasses
import itertools
import math
from typing import Iterable, List, Optional, Sequence, Tuple, Union

import numpy as np

from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.pair_shapes import Pair, factors, has_product
from mindlora.core.text import columns, number
from mindlora.files.adapters.adapter import Adapter, is_finite

# The shares of the energy for which a report shows ranks.
SHARES = (0.9, 0.95, 0.99)
# The number of singular values of a cell that fit into a line.
_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class CellSpectrum:
    """The singular values of one cell's change.

    Attributes:
        path (str): Path of the cell under MindFormers' names.
        rank (int): r of A [r, in] and B [out, r].
        singular_values (tuple of float): The min(r, in, out) singular values of scale B A, the largest first; None if
            they cannot be computed: A or B is not finite, lora_alpha is unknown, or a convolution has groups. For
            stacked experts, each is the root of the sum of the experts' squares at its place, so that the values from
            the k-th on give the norm of the part that rank k leaves out.
        ranks (tuple of int): The smallest ranks that hold each of SHARES of the energy, the sum of the squared singular
            values; for stacked experts, in every expert. None where singular_values is None, and 0 if scale B A
            is zero.
    """

    path: str
    rank: int
    singular_values: Optional[Tuple[float, ...]]
    ranks: Optional[Tuple[int, ...]]


def pair_svd(a: np.ndarray, b: np.ndarray, scale: float) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns U [out, k], S [k] and V^T [k, in] of scale B A = U diag(S) V^T, in float64; k is min(r, in, out)."""
    basis_b, small_b = np.linalg.qr(b.astype(np.float64))
    basis_a, small_a = np.linalg.qr(a.astype(np.float64).T)
    u, s, vh = np.linalg.svd(scale * (small_b @ small_a.T), full_matrices=False)
    return basis_b @ u, s, vh @ basis_a.T


def rank_holding(singular_values: Union[Sequence[float], np.ndarray], share: float) -> int:
    """Returns the smallest k for which the first k singular values, largest first, hold ``share`` of the energy.

    The energy is the sum of their squares, the squared Frobenius norm. It is 0 only if all of them are zero.
    """
    held = np.cumsum(np.square(np.asarray(singular_values, np.float64)))
    if not len(held) or held[-1] == 0:
        return 0
    # The last sum is exactly the whole, so a share of 1 is always reached.
    return int(np.searchsorted(held, share * held[-1])) + 1


def spectra(adapter: Adapter) -> List[CellSpectrum]:
    """Returns the spectrum of each of the adapter's cells, in the order of the file."""
    return [_spectrum(adapter, path) for path in adapter.paths]


def spectrum_table(spectra: Iterable[CellSpectrum]) -> str:
    """Returns spectra as a table: a line for each cell, with the largest singular values."""
    rows = []
    for cell in spectra:
        values = cell.singular_values
        ranks = cell.ranks
        largest = "-" if values is None else " ".join(map(number, values[:_SHOWN]))
        if values and len(values) > _SHOWN:
            largest += " ..."
        rows.append((cell.path, str(cell.rank), *map(number, ranks or [None] * len(SHARES)), largest))
    titles = ("cell", "rank", *(f"{share:.0%}" for share in SHARES), "largest singular values of scale B A")
    return columns(titles, rows)


def _spectrum(adapter: Adapter, path: str) -> CellSpectrum:
    a, b = quiet_pair(adapter, path)
    if path not in adapter.alphas or not (is_finite(a) and is_finite(b) and has_product(a, b)):
        return CellSpectrum(path, adapter.rank(path), None, None)
    products = adapter.layout(path).products(a, b)
    values = [pair_svd(*product, adapter.scale(path))[1] for product in products]
    ranks = tuple(max(map(rank_holding, values, itertools.repeat(share))) for share in SHARES)
    return CellSpectrum(path, adapter.rank(path), tuple(map(float, np.linalg.norm(values, axis=0))), ranks)


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
    """Returns ``adapter.pair(path)`` without NumPy's warnings; values that are not finite show in its norm."""
    with np.errstate(invalid="ignore", over="ignore"):
        return adapter.pair(path)
