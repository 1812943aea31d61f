"""lora_dropout in NumPy: what every path must compute."""

import numpy as np


def mixed(h: np.ndarray) -> np.ndarray:
    """A bijection of uint32 in which every bit of the result depends on every bit of ``h``."""
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> np.uint32(15))
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def kept(tokens: int, channels: int, seed: int, rate: float) -> np.ndarray:
    """Returns which elements are kept, as bool [tokens, channels]: those whose 31-bit hash is rate * 2^31 or more."""
    t, k = np.arange(tokens, dtype=np.uint32)[:, None], np.arange(channels, dtype=np.uint32)
    h = mixed(mixed(t * np.uint32(0x9E3779B1) + np.uint32(seed & 0xFFFFFFFF)) + k * np.uint32(0x85EBCA77))
    return (h & np.uint32(0x7FFFFFFF)) >= np.uint32(np.float32(rate) * np.float32(2**31))


def lora_dropout(x: np.ndarray, seed: int, rate: float) -> np.ndarray:
    """y[t, k] = x[t, k] / (1 - rate) where the element is kept, else 0, in float64.

    Args:
        x: [tokens, K].
        seed: Any int32.
        rate: In [0, 1).

    Returns:
        y, [tokens, K].
    """
    x = np.asarray(x, np.float64)
    return np.where(kept(*x.shape, seed, rate), x / (1 - np.float64(np.float32(rate))), 0)
