"""Initializers of A and B in NumPy, beyond the plain ones: orthogonal, PiSSA, OLoRA, MiCA, LoftQ, EVA's and VeRA's.

PiSSA, OLoRA and LoftQ take the initial pair from the base weight and subtract its product: W' = W - scale B0 A0. MiCA
takes B from the base weight, which stays as it is: A is zero.
"""

import math
import re
from typing import Callable, NamedTuple, Optional, Protocol, Tuple, TypeVar

import numpy as np

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number

NAMES = ("kaiming", "gaussian", "orthogonal", "pissa", "pissa_niter_N", "olora", "mica", "loftq", "loftq_iter_N")
_MICA = "mica"
# What PEFT's KaSA does to a base; mindlora reads such adapters and does not train them.
KASA = "kasa"
_PISSA = re.compile(r"pissa(?:_niter_(\d+))?")
_LOFTQ = re.compile(r"loftq(?:_iter_([1-9]\d*))?")
Quantized = TypeVar("Quantized")
# Random directions of randomized_svd beyond the rank; a few make the error small.
_OVERSAMPLING = 8
# The largest distance from 0 and 1 that products of orthonormal columns have after rounding to bfloat16.
_ROUNDING_OF_PRODUCTS = 0.02
# The randomized decomposition takes the place of the exact one where that would be several times slower.
_ITERATIONS = 4
_FEW = 4


class Shaped(Protocol):
    """Anything with a shape: an array, a parameter, a tensor to be written."""

    @property
    def shape(self) -> Tuple[int, ...]:
        """The size of each axis."""


class InitialPair(NamedTuple):
    """The initial A0 [r, in] and B0 [out, r] of a cell whose initializer changed the base, in the parameters' dtypes.

    ``fingerprint`` is the fingerprint of the base before the change, or None.
    """

    a: np.ndarray
    b: np.ndarray
    fingerprint: Optional[dict]


def is_known(name: str) -> bool:
    """Returns whether ``name`` is an initializer: one of NAMES, with a number in place of N."""
    return name in NAMES and not name.endswith("_N") or bool(_PISSA.fullmatch(name)) or is_loftq(name)


def is_loftq(name: Optional[str]) -> bool:
    """Returns whether an initializer is LoftQ: "loftq", or "loftq_iter_N" for N iterations."""
    return name is not None and bool(_LOFTQ.fullmatch(name))


def loftq_iterations(name: str) -> int:
    """Returns N of "loftq_iter_N", and 1 for "loftq"; raises ValueError for any other initializer."""
    match = _LOFTQ.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not one of LoftQ's initializers.")
    return int(match[1] or 1)


def changes_base(name: Optional[str]) -> bool:
    """Returns whether an initializer subtracts the product of its pair from the base weight."""
    return name is not None and (name == "olora" or bool(_PISSA.fullmatch(name)))


def freezes_b(name: Optional[str]) -> bool:
    """Returns whether an initializer fixes B for good, so that A alone trains: MiCA."""
    return name == _MICA


def computed_from_base(name: Optional[str]) -> bool:
    """Returns whether an initializer computes A or B from the loaded base weight."""
    return changes_base(name) or name == _MICA


def needs_whole_matrices(name: Optional[str]) -> bool:
    """Returns whether an initializer needs the whole weight, so that it cannot work on one shard of it."""
    return name == "orthogonal" or computed_from_base(name)


def orthogonal(
    rank: int, in_channels: int, out_channels: int, rng: np.random.Generator
) -> Tuple[np.ndarray, np.ndarray]:
    """Random A and B whose r-dimensional columns and rows are in orthogonal subspaces, so that B A = 0.

    With Q a random orthogonal [r, r], A = Q_even^T X / 10 and B = Y Q_odd / 10, X and Y standard normal. Returns
    (A float32 [r, in_channels], B float32 [out_channels, r]); raises ConfigError if r is odd.

    Source: PEFT's orthogonal (Datta, Rethinking LoRA initialisations, 2024).
    """
    check_even(rank)
    q = np.linalg.qr(rng.standard_normal((rank, rank)))[0]
    a = q[0::2].T @ rng.standard_normal((rank // 2, in_channels)) / 10
    b = rng.standard_normal((out_channels, rank // 2)) @ q[1::2] / 10
    return a.astype(np.float32), b.astype(np.float32)


def of_base(name: str, weight: np.ndarray, rank: int, scale: float) -> Tuple[np.ndarray, np.ndarray]:
    """Returns (A, B) by any initializer that reads the base: pissa, pissa_niter_N, olora, mica, kasa."""
    if name == KASA:
        return kasa(weight, rank, scale)
    if name == "olora":
        return olora(weight, rank, scale)
    if name == _MICA:
        return mica(weight, rank)
    match = _PISSA.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not computed from the base.")
    return pissa(weight, rank, scale, None if match[1] is None else int(match[1]))


def pissa(
    weight: np.ndarray, rank: int, scale: float, iterations: Optional[int] = None
) -> Tuple[np.ndarray, np.ndarray]:
    """The r largest singular values of W = U S V^T and their vectors: scale B A = U_r S_r V_r^T.

    A = sqrt(S_r / scale) V_r^T and B = U_r sqrt(S_r / scale).

    Args:
        weight (array): W [out, in], float32.
        rank (int): r, at most the smaller side of W.
        scale (float): Factor on the low-rank path.
        iterations (int): Power iterations of the randomized decomposition, which takes a fraction of the time and
            uses the same random numbers each time. Default: None, the exact decomposition.

    Returns:
        (A float32 [r, in], B float32 [out, r]).

    Raises:
        ConfigError: The rank is larger than a side of W.

    Source: Meng et al., PiSSA: Principal Singular Values and Singular Vectors Adaptation, 2024; Halko et al., Finding
    Structure with Randomness, 2011.
    """
    check_rank(rank, weight, "pissa")
    u, s, vt = (
        np.linalg.svd(weight, full_matrices=False) if iterations is None else randomized_svd(weight, rank, iterations)
    )
    root = np.sqrt(s[:rank] / np.float32(scale))
    return root[:, None] * vt[:rank], u[:, :rank] * root


def kasa(weight: np.ndarray, rank: int, scale: float) -> Tuple[np.ndarray, np.ndarray]:
    """The part of W that KaSA removes, its r smallest singular values, W = U S V^T: scale B A = U_r S_r V_r^T.

    Args, Returns and Raises are as in ``pissa``; r must be smaller than both sides of W.

    Source: Wang et al., KaSA: Knowledge-Aware Singular-Value Adaptation of Large Language Models, 2024.
    """
    check_rank(rank + 1, weight, KASA)
    u, s, vt = np.linalg.svd(weight, full_matrices=False)
    return vt[-rank:], u[:, -rank:] * (s[-rank:] / np.float32(scale))


def olora(weight: np.ndarray, rank: int, scale: float) -> Tuple[np.ndarray, np.ndarray]:
    """A and B of the QR decomposition W = Q R: the first r rows of R and the first r columns of Q, at every scale.

    Args, Returns and Raises are as in ``pissa``.

    Source: Buyukakyuz, OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models, 2024.
    """
    del scale
    check_rank(rank, weight, "olora")
    q, r = np.linalg.qr(weight)
    return r[:rank], q[:, :rank]


def mica(weight: np.ndarray, rank: int) -> Tuple[np.ndarray, np.ndarray]:
    """Zeros and the left singular vectors U_r of the r smallest singular values of W = U S V^T: A = 0, B = U_r.

    B does not train, so the adapter adds nothing at first, and later only components in these directions.

    Args:
        weight (array): W [out, in], float32.
        rank (int): r, at most the smaller side of W.

    Returns:
        (A float32 [r, in], B float32 [out, r]), the smallest singular value last, as in PEFT.

    Raises:
        ConfigError: The rank is larger than a side of W.

    Source: Rüdiger and Raschka, MiCA Learns More Knowledge Than LoRA and Full Fine-Tuning, 2026.
    """
    check_rank(rank, weight, _MICA)
    u = np.linalg.svd(weight, full_matrices=False)[0]
    return np.zeros((rank, weight.shape[1]), np.float32), u[:, -rank:]


def has_orthonormal_columns(matrix: np.ndarray) -> bool:
    """Returns whether B^T B of a float32 [out, r] is the identity, up to the rounding of B to 16 bits."""
    return bool((np.abs(matrix.T @ matrix - np.eye(matrix.shape[1])) < _ROUNDING_OF_PRODUCTS).all())


def residual(weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Returns W' = W - scale B A, float32 [out, in]."""
    return weight - (b * np.float32(scale)) @ a


def loftq(
    weight: np.ndarray,
    rank: int,
    quantize: Callable[[np.ndarray], Quantized],
    dequantize: Callable[[Quantized], np.ndarray],
    iterations: int = 1,
    scale: float = 1.0,
) -> Tuple[Quantized, np.ndarray, np.ndarray]:
    """Q, A and B such that dequantize(Q) + scale B A is close to W.

    Each iteration computes Q = quantize(W - scale B A), then A and B as PiSSA's pair for W - dequantize(Q).

    Args:
        weight (array): W [out, in], float32.
        rank (int): r, at most the smaller side of W.
        quantize (callable): array [out, in] -> its quantized form Q.
        dequantize (callable): Q -> array [out, in].
        iterations (int): Number of iterations, at least 1. Default: 1.
        scale (float): Factor on the low-rank path. Default: 1.0; PEFT ignores the scale.

    Returns:
        (Q, A float32 [r, in], B float32 [out, r]).

    Raises:
        ConfigError: The rank is larger than a side of W, or iterations is below 1.

    Source: Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models, 2023.
    """
    check_number(iterations, "iterations of loftq", COUNT)
    rest = weight
    for _ in range(iterations):
        quantized = quantize(rest)
        a, b = pissa(weight - dequantize(quantized), rank, scale)
        rest = residual(weight, a, b, scale)
    return quantized, a, b


def check_even(rank: int) -> None:
    """Raises ConfigError if ``rank`` is odd, for the initializer "orthogonal"."""
    if rank % 2:
        raise ConfigError(
            f"lora_init is 'orthogonal' and lora_rank is {rank}: this initializer needs an even rank. "
            "Set lora_rank to an even number."
        )


def check_rank(rank: int, weight: Shaped, name: str) -> None:
    """Raises ConfigError if ``rank`` is larger than a side of ``weight``, for the initializer ``name``."""
    if rank > min(weight.shape):
        raise ConfigError(
            f"lora_init is {name!r} and lora_rank is {rank}, more than the smaller side of a weight "
            f"{list(weight.shape)}. Lower lora_rank."
        )


def vera_projection(key: int, rank: int, in_channels: int, out_channels: int) -> Tuple[np.ndarray, np.ndarray]:
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


def randomized_svd(matrix: np.ndarray, rank: int, iterations: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (U, S, V^T) of W projected onto the range of (W W^T)^iterations W X, with X random directions.

    They hold the ``rank`` leading singular values and vectors, and a few more. Each call draws the same X.

    Args:
        matrix (array): W [rows, columns], float32 or float64.
        rank (int): At most the smaller side of W.
        iterations (int): More of them give a more exact result: 4 are usual, 16 nearly exact.

    Source: Halko et al., Finding Structure with Randomness, 2011.
    """
    if matrix.shape[0] < matrix.shape[1]:
        u, s, vt = randomized_svd(matrix.T, rank, iterations)
        return vt.T, s, u.T
    directions = min(rank + _OVERSAMPLING, *matrix.shape)
    rng = np.random.default_rng(0)
    q = np.linalg.qr(matrix @ rng.standard_normal((matrix.shape[1], directions), np.float32))[0]
    for _ in range(iterations):
        q = np.linalg.qr(matrix.T @ q)[0]
        q = np.linalg.qr(matrix @ q)[0]
    u, s, vt = np.linalg.svd(q.T @ matrix, full_matrices=False)
    return q @ u, s, vt


class PrincipalComponents:
    """The leading principal components of all rows so far, updated by a decomposition of each batch.

    With S V the components of the rows before, each times its singular value, n their number and m their mean, those of
    a batch X of k rows with mean x are the leading right singular vectors of [S V; X - x; sqrt(n k / (n + k)) (m - x)].

    Source: Ross et al., Incremental Learning for Robust Visual Tracking, 2008, as in scikit-learn's IncrementalPCA.

    Args:
        count (int): How many components, at least 1.

    Attributes:
        components (array): float32 [count, features], the strongest first; None before the first batch. The largest
            element of each is positive.
        explained (array): float64 [count], the share of the variance of all rows that each explains; None before.
    """

    def __init__(self, count: int):
        self.count = count
        self.components: Optional[np.ndarray] = None
        self.explained: Optional[np.ndarray] = None
        self._singular_values = np.zeros(0)
        self._mean = np.zeros(0)
        self._variance = np.zeros(0)
        self._rows = 0

    def update(self, rows: np.ndarray) -> None:
        """Adds a batch, float32 [k, features], where k and features are at least ``count``."""
        batch = rows.astype(np.float64)
        mean, variance, number = batch.mean(axis=0), batch.var(axis=0), len(batch)
        batch -= mean
        if self.components is None:
            self._mean = self._variance = np.zeros_like(mean)
        else:
            before = self._singular_values[:, None] * self.components
            shift = np.sqrt(self._rows * number / (self._rows + number)) * (self._mean - mean)
            batch = np.vstack([before, batch, shift])
        total = self._rows + number
        old_share, new_share = self._rows / total, number / total
        spread = old_share * new_share * (self._mean - mean) ** 2
        self._variance = old_share * self._variance + new_share * variance + spread
        self._mean = old_share * self._mean + new_share * mean
        self._rows = total
        if _FEW * self.count < min(batch.shape):
            _, values, vectors = randomized_svd(batch, self.count, _ITERATIONS)
        else:
            _, values, vectors = np.linalg.svd(batch, full_matrices=False)
        vectors = vectors[: self.count]
        largest = vectors[np.arange(len(vectors)), np.abs(vectors).argmax(axis=1)]
        self.components = (vectors * np.sign(largest)[:, None]).astype(np.float32)
        self._singular_values = values[: self.count]
        whole = self._variance.sum() * total
        self.explained = self._singular_values**2 / whole if whole > 0 else np.zeros(len(vectors))
