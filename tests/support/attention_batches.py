"""Batches for paged_attention: sequences whose keys and values lie in blocks of a cache, in any order."""

import numpy as np

from tests.support.native import call, normal

NAMES = (
    "query",
    "key",
    "value",
    "cos",
    "sin",
    "key_cache",
    "value_cache",
    "block_tables",
    "context_lengths",
    "query_lengths",
)
# The inputs up to the caches, which the kernel writes to.
_UP_TO_CACHES = 7


class Sequences:
    """Sequences of some lengths with all queries, keys and values of theirs.

    Args:
        lengths (list): Tokens of each.
        kv_heads, group, size (int): Heads of keys, query heads of each, numbers of a head.
        dtype (str): The dtype that can hold the numbers. Default: float32.
    """

    def __init__(self, lengths, kv_heads, group, size, dtype="float32"):
        self.kv_heads, self.size, self.dtype = kv_heads, size, dtype
        self.query, self.key, self.value = (
            [normal(length, width, seed=100 * seed + i, dtype=dtype) for i, length in enumerate(lengths)]
            for seed, width in ((1, kv_heads * group * size), (2, kv_heads * size), (3, kv_heads * size))
        )

    def batch(self, parts, block_size, seed=0, unused=np.nan):
        """Returns the inputs of one step, whose tables turn nothing: the numbers of a part are as if turned already.

        Args:
            parts (list): (sequence, first, end) of the tokens of each part of the step; before them, the keys of the
                sequence are in the cache already.
            block_size (int): Tokens of a block.
            seed (int): For the order of the blocks. Default: 0.
            unused (float): What is in the cache where no token is. Default: NaN, which would spoil any sum.
        """
        counts = [-(-end // block_size) for _, _, end in parts]
        order = np.random.default_rng(seed).permutation(sum(counts) + 2).astype(np.int32)
        caches = [np.full((len(order), block_size, self.kv_heads, self.size), unused, np.float32) for _ in "kv"]
        tables, start = np.full((len(parts), max(counts) + 1), -1, np.int32), 0
        for row, (which, first, _), count in zip(tables, parts, counts):
            row[:count] = order[start : start + count]
            start += count
            slots = row[np.arange(first) // block_size] * block_size + np.arange(first) % block_size
            for cache, rows in zip(caches, (self.key[which], self.value[which])):
                cache.reshape(-1, rows.shape[1])[slots] = rows[:first]
        new = [
            np.concatenate([of[which][first:end] for which, first, end in parts])
            for of in (self.query, self.key, self.value)
        ]
        cos, sin = (np.full((len(new[0]), self.size), value, np.float32) for value in (1, 0))
        lengths = np.int32([(end, end - first) for _, first, end in parts]).T
        return [*new, cos, sin, *caches, tables, *np.ascontiguousarray(lengths)]

    def run(self, *step, **keys):
        """Returns the kernel's output for the same arguments as those of ``batch``."""
        return run(self.batch(*step, **keys), self.dtype)


def angles(positions, size):
    """Returns cos and sin [T, D] of positions, of which each number is another: no half of a head is the other's."""
    table = np.outer(np.asarray(positions, np.float32), np.linspace(0.1, 1.3, size, dtype=np.float32))
    return np.cos(table), np.sin(table)


def run(inputs, dtype="float32"):
    """Returns the output of the library's kernel on a batch, which stays as it is."""
    return run_and_write(inputs, dtype)[-1]


def run_and_write(inputs, dtype="float32"):
    """Returns key_cache and value_cache after the kernel, and its output."""
    floats = len(NAMES) - 3
    arrays = [(array, dtype if place < floats else "int32") for place, array in enumerate(inputs)]
    *written, y = call("PagedAttention", arrays, inputs[0].shape, dtype, in_place=_UP_TO_CACHES)
    for name, before, after in zip(NAMES, inputs, written[:-2]):
        np.testing.assert_array_equal(after, before, f"the kernel changed {name}")
    return [*written[-2:], y]
