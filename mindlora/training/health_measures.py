"""The numbers of AdapterHealth: norms, updates and effective ranks from A and B, without their product."""

import dataclasses
import math
from typing import Any, Dict, Optional, Tuple

import numpy as np

from mindlora.training.health import CellHealth, HealthReport, PartHealth


@dataclasses.dataclass(frozen=True)
class CellValues:
    """What the health of one cell's adapter is computed from.

    Attributes:
        rank (int): Rank r.
        parts (dict): Name of the part -> its values, float32.
        zero_part (str): The part that is zero until it trains.
        factors (tuple or None): What change_factors returned, or None if there is no such product.
        scale (float): The adapter's scale.
        weight_norm (float or None): |W|.
        before (dict): Name of the part -> its values before the last step, of the parts that train.
        gradient_norms (dict): Name of the part -> norm of its gradient in the last step.
    """

    rank: int
    parts: Dict[str, np.ndarray]
    zero_part: str
    factors: Optional[Tuple[np.ndarray, np.ndarray]] = None
    scale: float = 1.0
    weight_norm: Optional[float] = None
    before: Dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    gradient_norms: Dict[str, float] = dataclasses.field(default_factory=dict)


def measure(step: int, cells: Dict[str, CellValues]) -> HealthReport:
    """Returns the health of all cells after a step, without findings.

    Args:
        step (int): The step.
        cells (dict): Path -> CellValues.
    """
    values = _all_singular_values({path: cell.factors for path, cell in cells.items() if cell.factors is not None})
    return HealthReport(step, {path: _cell_health(cell, values.get(path)) for path, cell in cells.items()})


def change_factors(
    a: np.ndarray, b: np.ndarray, initial: Optional[Tuple[np.ndarray, np.ndarray]] = None
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns two matrices whose product is B A, or B A - B0 A0.

    The second is formed as [B - B0, B] [A0; A - A0], where nothing cancels however little A and B have moved.

    Args:
        a (numpy.ndarray): A, float32 [r, in], or of a convolution [r, in, kh, kw].
        b (numpy.ndarray): B, float32 [out, r], or of a convolution [out, r, 1, 1].
        initial (tuple): A0 and B0, of the same shapes. Default: None.

    Returns:
        tuple of numpy.ndarray, [out, r] and [r, in]; with ``initial``, of rank 2 r.
    """
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    if initial is None:
        return b, a
    a0, b0 = (half.reshape(len(half), -1) for half in initial)
    return np.concatenate([b - b0, b], axis=1), np.concatenate([a0, a - a0])


def effective_rank(singular_values: np.ndarray) -> Optional[float]:
    """Returns exp(-sum p_i log p_i) with p_i the i-th singular value over their sum; None if all are zero.

    Args:
        singular_values (numpy.ndarray): float64 [r], none negative.

    Source: Roy and Vetterli, The effective rank: A measure of effective dimensionality, 2007.
    """
    total = singular_values.sum()
    if not total > 0:
        return None
    shares = singular_values[singular_values > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


def singular_values(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the singular values of products from the Gram matrices of their factors, without forming a product.

    The matrices G = L^T L and H = R R^T have roots with G = P^T P and H = Q^T Q, and L R has the singular values of
    P Q^T. Values below about 1e-7 of the largest are lost; the rounding of float32 factors has changed them already.

    Args:
        left (numpy.ndarray): G of each product, float64 [cells, r, r].
        right (numpy.ndarray): H of each product, float64 [cells, r, r].

    Returns:
        numpy.ndarray, float64 [cells, r], the largest first.
    """
    # Rows of R of very different sizes (A0 and A - A0) would cost digits: each gets the norm 1, and L the rest.
    norms = np.sqrt(np.einsum("cii->ci", right))
    norms = np.where(norms > 0, norms, 1.0)
    pairs = norms[:, :, None] * norms[:, None, :]
    return np.linalg.svd(_root(left * pairs) @ _root(right / pairs).swapaxes(1, 2), compute_uv=False)


def _root(gram):
    """Returns P with P^T P = ``gram``, for each matrix of a stack."""
    values, vectors = np.linalg.eigh(gram)
    return np.sqrt(np.maximum(values, 0.0))[:, :, None] * vectors.swapaxes(1, 2)


def _all_singular_values(factors):
    """Returns path -> singular values of the product, or None where a factor is not finite."""
    grams: Dict[int, Dict[str, Any]] = {}
    found = dict.fromkeys(factors)
    for path, (left, right) in factors.items():
        # One cell at a time, so that its float64 copies stay in the cache.
        left, right = left.astype(np.float64), right.astype(np.float64)
        pair = left.T @ left, right @ right.T
        if all(np.isfinite(gram).all() for gram in pair):
            grams.setdefault(len(right), {})[path] = pair
    for same_rank in grams.values():
        stacks = (np.stack(side) for side in zip(*same_rank.values()))
        found.update(zip(same_rank, singular_values(*stacks)))
    return found


def _cell_health(cell: CellValues, values: Optional[np.ndarray]) -> CellHealth:
    parts = {
        name: PartHealth(
            size=array.size,
            norm=_norm(array),
            zeros=np.count_nonzero(array == 0) / array.size,
            gradient_norm=cell.gradient_norms.get(name),
            update=_update(array, cell.before.get(name)),
        )
        for name, array in cell.parts.items()
    }
    rank = cell.rank if cell.factors is None else len(cell.factors[1])
    if values is None:
        return CellHealth(rank, cell.zero_part, parts)
    norm = float(abs(cell.scale) * np.linalg.norm(values))
    return CellHealth(
        rank,
        cell.zero_part,
        parts,
        effective_rank=effective_rank(values),
        change_norm=norm,
        change=norm / cell.weight_norm if cell.weight_norm else None,
        singular_values=[float(f"{abs(cell.scale) * value:.4g}") for value in values],
    )


def _update(array, before):
    if before is None:
        return None
    norm = _norm(before)
    return _norm(array - before) / norm if norm else None


def _norm(array) -> float:
    return math.sqrt(np.vdot(array, array))
