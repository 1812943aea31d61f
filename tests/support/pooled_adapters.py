"""Pools of adapters of mixed ranks and who uses which, for the tests of multi_lora_delta and multi_lora_linear."""

import numpy as np

from tests.support.native import normal

SLOTS, MAX_RANK = 7, 64
TRUE_RANKS = np.int32([1, 8, 13, 16, 64, 0, 33])
KINDS = ("identical", "distinct", "uniform", "zipf", "skewed", "segments", "skipped", "none")


def popularity(kind, tokens, slots=SLOTS, seed=0):
    """Which adapter each row uses: the patterns of Punica's benchmarks, and some rows without one."""
    rng = np.random.default_rng([seed, tokens])
    if kind == "identical":
        return np.full(tokens, 2, np.int32)
    if kind == "distinct":
        return (np.arange(tokens) % slots).astype(np.int32)
    if kind == "uniform":
        return rng.integers(0, slots, tokens).astype(np.int32)
    if kind == "zipf":
        return np.minimum(rng.zipf(1.5, tokens) - 1, slots - 1).astype(np.int32)
    if kind == "skewed":  # all but one row in four use the adapter of the greatest rank
        return np.where(rng.random(tokens) < 0.75, 4, rng.integers(0, slots, tokens)).astype(np.int32)
    if kind == "segments":  # rows of one request are adjacent
        return np.sort(rng.integers(0, slots, tokens)).astype(np.int32)
    if kind == "skipped":
        uniform, negative = rng.integers(0, slots, tokens), -1 - rng.integers(0, 9, tokens)
        return np.where(rng.random(tokens) < 0.5, negative, uniform).astype(np.int32)
    return np.full(tokens, -1, np.int32)


def pooled(width, ranks=TRUE_RANKS, max_rank=MAX_RANK, dtype="float32"):
    """Returns pool, ranks and scales. The pool beyond the true ranks is NaN, which must not enter any sum."""
    pool = normal(len(ranks), max_rank, width, seed=3, dtype=dtype)
    for block, rank in zip(pool, ranks):
        block[rank:] = np.nan
    return pool, ranks, np.linspace(-1, 1.5, len(ranks)).astype(np.float32)
