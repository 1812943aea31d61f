"""VeRA's two random matrices, equal to PEFT's for the same key."""

import math
from typing import Tuple

import numpy as np


def projection(key: int, rank: int, in_channels: int, out_channels: int) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the frozen A and B that all cells of a VeRA network share, uniform in +-sqrt(6 / fan_in), float32.

    They are the numbers that PyTorch's CPU generator draws for ``key``, A first, so they equal PEFT's bit for bit. The
    generator uses the lower 32 bits of ``key``. A is [r, in_channels] with fan_in in_channels, B [out_channels, r] with
    fan_in r; a smaller cell takes the first columns of A and the first rows of B.

    Source: Kopiczko et al., VeRA: Vector-based Random Matrix Adaptation, 2024, section 3.2.
    """
    generator = np.random.RandomState(key & 0xFFFFFFFF)
    return (_uniform(generator, (rank, in_channels), in_channels), _uniform(generator, (out_channels, rank), rank))


def _uniform(generator: np.random.RandomState, shape: Tuple[int, int], fan_in: int) -> np.ndarray:
    # PyTorch takes the lower 24 bits of each word of the Mersenne Twister.
    words = generator.randint(0, 2**32, size=shape, dtype=np.uint32) & np.uint32(2**24 - 1)
    bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(fan_in))
    low = np.float32(-bound)
    high = np.float32(bound)
    # One rounding for product and sum, as in PyTorch: the product is exact in float64.
    return (words * (2.0**-24 * np.float64(high - low)) + np.float64(low)).astype(np.float32)
