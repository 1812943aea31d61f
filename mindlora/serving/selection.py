"""Which tokens may be drawn (top_k, top_p), and the draw: one row of a vocabulary, without sorting it."""

import math
from typing import Tuple

import numpy as np

# Values whose maxima or sums are looked at first.
_BLOCK = 128
# Tokens that are mostly enough for top_p.
_LIKELY = 128
# Up to this many candidates are sorted.
_FEW = 512
# Halvings of the range in which a border is looked for: more than float32 can tell apart.
_HALVINGS = 40


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the places of the ``count`` largest values, and of all that equal the smallest of these.

    Args:
        values (numpy.ndarray): float [n], without NaN.
        count (int): At least 1.

    Returns:
        numpy.ndarray: int64, ascending.
    """
    size = len(values)
    if count >= size:
        return np.arange(size)
    places = None
    if size // _BLOCK >= count:
        # ``count`` blocks have a maximum of at least this one: no smaller value is among the largest.
        maxima = values[: size // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
        places = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
        values = values[places]
    found = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return found if places is None else places[found]


def nucleus(masses: np.ndarray, top_p: float) -> np.ndarray:
    """Returns the places of the fewest largest masses that make up top_p of their sum (Holtzman et al., 2020).

    A mass is kept if those before it, from the largest on, make up less than top_p; so one is always kept. Among equal
    ones, the first are kept.

    Args:
        masses (numpy.ndarray): float32 [n], not negative; the largest is 1.
        top_p (float): From 0 to 1.

    Returns:
        numpy.ndarray: int64, ascending.
    """
    needed = max(top_p * float(masses.sum(dtype=np.float64)), np.finfo(np.float64).tiny)
    places = largest(masses, _LIKELY)
    if float(masses[places].sum(dtype=np.float64)) >= needed:
        return places[_first(masses[places], needed)]
    return _first(masses, needed)


def _first(masses, needed):
    """Returns the places of the fewest largest masses whose sum is ``needed`` or more."""
    border, rank = _border(masses, needed)
    kept = masses >= border
    excess = int(np.count_nonzero(kept)) - rank
    if excess > 0:
        kept[np.flatnonzero(masses == border)[-excess:]] = False
    return np.flatnonzero(kept)


def _border(masses, needed) -> Tuple[np.float32, int]:
    """Returns the smallest mass that is kept, and how many are.

    The masses above ``low`` are enough, those above ``high`` are not: the range is halved (in the logarithm) until few
    masses lie in it, which are sorted. A pass over all is many times faster than a sort.
    """
    # Masses below this are less than what is not needed even if all are: the factor is for rounding.
    unneeded = float(masses.sum(dtype=np.float64)) - needed
    low = np.float32(0.999 * max(unneeded, 0.0) / len(masses))
    high, before = masses.max(), 0.0
    many, few = len(masses), 0
    above, product = np.empty(len(masses), bool), np.empty_like(masses)
    for _ in range(_HALVINGS):
        if many - few <= _FEW:
            break
        middle = np.float32(math.sqrt(float(low) * float(high)))
        np.greater(masses, middle, out=above)
        mass = float(np.multiply(masses, above, out=product).sum(dtype=np.float64))
        count = int(np.count_nonzero(above))
        if mass >= needed:
            low, many = middle, count
        else:
            high, few, before = middle, count, mass
    between = np.sort(masses[(masses > low) & (masses <= high)])[::-1]
    last = int(np.searchsorted(before + np.cumsum(between, dtype=np.float64), needed))
    last = min(last, len(between) - 1)
    return between[last], few + last + 1


def draw(masses: np.ndarray, uniform: float) -> int:
    """Returns a place, drawn with probabilities proportional to the masses: the inverse of their running sum.

    Args:
        masses (numpy.ndarray): float32 [n], not negative, not all 0.
        uniform (float): A random number from the interval [0, 1).
    """
    blocks = np.cumsum(np.add.reduceat(masses, np.arange(0, len(masses), _BLOCK), dtype=np.float64))
    # Above 0 and not above the sum, so that a mass of 0 is never drawn.
    target = (1.0 - uniform) * blocks[-1]
    block = int(np.searchsorted(blocks, target))
    before = blocks[block - 1] if block else 0.0
    within = np.cumsum(masses[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + int(np.searchsorted(within, min(target - before, within[-1])))
