"""The gradient of a function of NumPy arrays by finite differences."""

from typing import Callable

import numpy as np

STEP = 1e-5


def finite_differences(function: Callable[[], float], array: np.ndarray) -> np.ndarray:
    """Returns the gradient of ``function()``, which reads ``array``, float64, for each number in it."""
    gradient = np.empty(array.shape)
    for at in np.ndindex(array.shape):
        before = array[at]
        array[at] = before + STEP
        above = function()
        array[at] = before - STEP
        gradient[at] = (above - function()) / (2 * STEP)
        array[at] = before
    return gradient
