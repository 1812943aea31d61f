"""Starts of A and B beyond the plain ones, in NumPy: orthogonal, PiSSA, OLoRA, LoftQ.

PiSSA, OLoRA and LoftQ begin with what the base already does, B0 A0, and take it out of the base: W' = W - scale B0 A0.
"""

import re
from typing import Callable, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.errors import ConfigError

NAMES = ("kaiming", "gaussian", "orthogonal", "pissa", "pissa_niter_N", "olora", "loftq", "loftq_iter_N")
_PISSA = re.compile(r"pissa(?:_niter_(\d+))?")
_LOFTQ = re.compile(r"loftq(?:_iter_([1-9]\d*))?")
# Directions that the randomized decomposition looks at beyond the rank: with a few more it hardly errs (Halko, 2011).
_OVERSAMPLING = 8


class InitialPair(NamedTuple):
    """What a cell whose base was corrected began with.

    Attributes:
        a, b (array): A0 [r, in] and B0 [out, r], in the dtypes of the parameters.
        fingerprint (dict): Mark of the base as it was before, or None.
    """

    a: np.ndarray
    b: np.ndarray
    fingerprint: Optional[dict]


def is_known(name: str) -> bool:
    """Tells whether ``name`` is a start: one of NAMES, with a number for N."""
    return name in NAMES and not name.endswith("_N") or bool(_PISSA.fullmatch(name)) or is_loftq(name)


def is_loftq(name: Optional[str]) -> bool:
    """Tells whether a start is LoftQ's: "loftq", or "loftq_iter_N" for N turns."""
    return name is not None and bool(_LOFTQ.fullmatch(name))


def loftq_iterations(name: str) -> int:
    """Returns how often LoftQ's start by its name takes turns: 1 where it does not say."""
    return int(_LOFTQ.fullmatch(name).group(1) or 1)


def changes_base(name: Optional[str]) -> bool:
    """Tells whether a start takes from the base what it puts into A and B."""
    return name is not None and (name == "olora" or bool(_PISSA.fullmatch(name)))


def needs_whole_matrices(name: Optional[str]) -> bool:
    """Tells whether a start cannot be made for a part of a matrix alone."""
    return name == "orthogonal" or changes_base(name)


def orthogonal(rank: int, in_channels: int, out_channels: int, rng: np.random.Generator):
    """A and B of random rows and columns in two halves of r-space that are orthogonal to each other, so that B A = 0.

    With Q a random orthogonal [r, r], A = Q_even^T X / 10 and B = Y Q_odd / 10, X and Y standard normal.

    Args:
        rank (int): r, even.
        in_channels, out_channels (int): Sizes of the cell.
        rng (numpy.random.Generator): Where the numbers come from.

    Returns:
        (A float32 [r, in_channels], B float32 [out_channels, r]).

    Raises:
        ConfigError: The rank is odd.

    Source: PEFT's orthogonal (Datta, Rethinking LoRA initialisations, 2024).
    """
    if rank % 2:
        raise ConfigError(
            f"lora_init is 'orthogonal' and lora_rank {rank}: it takes an even rank, whose halves are "
            "orthogonal to each other."
        )
    q = np.linalg.qr(rng.standard_normal((rank, rank)))[0]
    a = q[0::2].T @ rng.standard_normal((rank // 2, in_channels)) / 10
    b = rng.standard_normal((out_channels, rank // 2)) @ q[1::2] / 10
    return a.astype(np.float32), b.astype(np.float32)


def of_base(name: str, weight: np.ndarray, rank: int, scale: float) -> Tuple[np.ndarray, np.ndarray]:
    """Returns (A, B) of a start that changes the base, by its name: pissa, pissa_niter_N or olora."""
    if name == "olora":
        return olora(weight, rank, scale)
    iterations = _PISSA.fullmatch(name).group(1)
    return pissa(weight, rank, scale, None if iterations is None else int(iterations))


def pissa(
    weight: np.ndarray, rank: int, scale: float, iterations: Optional[int] = None
) -> Tuple[np.ndarray, np.ndarray]:
    """The r largest singular directions of W = U S V^T, shared evenly: scale B A = U_r S_r V_r^T.

    A = sqrt(S_r / scale) V_r^T and B = U_r sqrt(S_r / scale).

    Args:
        weight (array): W [out, in], float32.
        rank (int): r, at most the smaller side of W.
        scale (float): Factor on the low-rank path.
        iterations (int): Power iterations of the randomized decomposition, which takes a fraction of the time; its
            random numbers are the same each time. Default: None, the exact decomposition.

    Returns:
        (A float32 [r, in], B float32 [out, r]).

    Raises:
        ConfigError: The rank is larger than a side of W.

    Source: Meng et al., PiSSA: Principal Singular Values and Singular Vectors Adaptation, 2024; Halko et al., Finding
    Structure with Randomness, 2011.
    """
    check_rank(rank, weight, "pissa")
    u, s, vt = (
        np.linalg.svd(weight, full_matrices=False) if iterations is None else _randomized_svd(weight, rank, iterations)
    )
    root = np.sqrt(s[:rank] / np.float32(scale))
    return root[:, None] * vt[:rank], u[:, :rank] * root


def olora(weight: np.ndarray, rank: int, scale: float) -> Tuple[np.ndarray, np.ndarray]:
    """A and B of the QR decomposition W = Q R: the first r rows of R and the first r columns of Q.

    Args:
        weight (array): W [out, in], float32.
        rank (int): r, at most the smaller side of W.
        scale (float): Not used: the start is the same at every scale.

    Returns:
        (A float32 [r, in], B float32 [out, r]).

    Raises:
        ConfigError: The rank is larger than a side of W.

    Source: Buyukakyuz, OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models, 2024.
    """
    del scale
    check_rank(rank, weight, "olora")
    q, r = np.linalg.qr(weight)
    return r[:rank], q[:, :rank]


def residual(weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Returns W' = W - scale B A, float32 [out, in]."""
    return weight - (b * np.float32(scale)) @ a


def loftq(
    weight: np.ndarray, rank: int, quantize: Callable, dequantize: Callable, iterations: int = 1, scale: float = 1.0
):
    """Q, A and B such that dequantize(Q) + scale B A is near W, by turns: Q of W - scale B A, B A of W - dequantize(Q).

    Args:
        weight (array): W [out, in], float32.
        rank (int): r, at most the smaller side of W.
        quantize (callable): array [out, in] -> what stands for it.
        dequantize (callable): what stands for it -> array [out, in].
        iterations (int): Turns, at least 1. Default: 1.
        scale (float): Factor on the low-rank path. Default: 1.0; PEFT leaves the scale out of account.

    Returns:
        (what quantize returned, A float32 [r, in], B float32 [out, r]).

    Raises:
        ConfigError: The rank is larger than a side of W, or iterations is below 1.

    Source: Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models, 2023.
    """
    if iterations < 1:
        raise ConfigError(f"iterations of loftq is {iterations}: it must be a whole number of at least 1.")
    rest = weight
    for _ in range(iterations):
        quantized = quantize(rest)
        a, b = pissa(weight - dequantize(quantized), rank, scale)
        rest = residual(weight, a, b, scale)
    return quantized, a, b


def _randomized_svd(weight, rank, iterations):
    """Returns (U, S, V^T) of the projection of W onto what its powers do most to random directions."""
    if weight.shape[0] < weight.shape[1]:
        u, s, vt = _randomized_svd(weight.T, rank, iterations)
        return vt.T, s, u.T
    directions = min(rank + _OVERSAMPLING, *weight.shape)
    rng = np.random.default_rng(0)
    q = np.linalg.qr(weight @ rng.standard_normal((weight.shape[1], directions), np.float32))[0]
    for _ in range(iterations):
        q = np.linalg.qr(weight.T @ q)[0]
        q = np.linalg.qr(weight @ q)[0]
    u, s, vt = np.linalg.svd(q.T @ weight, full_matrices=False)
    return q @ u, s, vt


def check_rank(rank, weight, name):
    if rank > min(weight.shape):
        raise ConfigError(
            f"lora_init is {name!r} and lora_rank {rank}, more than the smaller side of a weight "
            f"{list(weight.shape)}: it has no so many directions. Lower lora_rank."
        )
