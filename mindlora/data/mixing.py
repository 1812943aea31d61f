"""Several inputs in one training set: which of their examples are drawn."""

import math
from typing import List, Sequence, Union

import numpy as np

from mindlora.data.conversion import Encoded
from mindlora.errors import DataError


def check_weights(weights: Union[Sequence[float], None], inputs: int) -> None:
    """Raises DataError unless there are no weights, or one above 0 for each input."""
    if weights is None:
        return
    if len(weights) != inputs:
        raise DataError(f"{inputs} inputs have {len(weights)} weights: give each input one weight.")
    wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if wrong:
        raise DataError(f"A weight of an input is {wrong[0]}: it must be a number above 0, such as 0.7.")


def drawn_counts(sizes: Sequence[int], weights: Sequence[float]) -> List[int]:
    """Returns how many examples each input contributes: shares in proportion to the weights, of as many as there are.

    With w_i = weight_i / (sum of weights), input i contributes w_i N examples, rounded but at least 1, for the largest
    N at which no input needs more than it has: N = min_i(size_i / w_i). So one input is used completely, the others in
    part, and no example is repeated.

    Args:
        sizes (sequence of int): Examples in each input, at least 1.
        weights (sequence of float): One for each, above 0.
    """
    least = min(size / weight for size, weight in zip(sizes, weights))
    return [min(max(round(least * weight), 1), size) for size, weight in zip(sizes, weights)]


def mix(inputs: Sequence[List[Encoded]], weights: Union[Sequence[float], None], seed: int) -> List[List[Encoded]]:
    """Returns the examples of each input that are used, in their first order.

    Args:
        inputs (sequence of list of Encoded): The usable examples of each input.
        weights (sequence of float, optional): See drawn_counts. None: every example is used.
        seed (int): Decides which examples are drawn.
    """
    if weights is None:
        return list(inputs)
    counts = drawn_counts([len(examples) for examples in inputs], weights)
    return [
        [examples[index] for index in sorted(np.random.default_rng((seed, number)).permutation(len(examples))[:count])]
        for number, (examples, count) in enumerate(zip(inputs, counts), 1)
    ]
