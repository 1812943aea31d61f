"""Batches for paged_attention: sequences whose keys and values lie in blocks of a cache, in any order."""

import numpy as np

from tests.support.native import call, normal

NAMES = ("query", "key_cache", "value_cache", "block_tables", "context_lengths", "query_lengths")


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
        """Returns the inputs of one step.

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
        for row, (which, _, end), count in zip(tables, parts, counts):
            row[:count] = order[start : start + count]
            start += count
            slots = row[np.arange(end) // block_size] * block_size + np.arange(end) % block_size
            for cache, rows in zip(caches, (self.key[which], self.value[which])):
                cache.reshape(-1, rows.shape[1])[slots] = rows[:end]
        query = np.concatenate([self.query[which][first:end] for which, first, end in parts])
        lengths = np.int32([(end, end - first) for _, first, end in parts]).T
        return [query, *caches, tables, *np.ascontiguousarray(lengths)]

    def run(self, *step, **keys):
        """Returns the kernel's output for the same arguments as those of ``batch``."""
        return run(self.batch(*step, **keys), self.dtype)


def run(inputs, dtype="float32"):
    """Calls the kernel of the library on a batch."""
    arrays = [(array, "int32" if array.dtype == np.int32 else dtype) for array in inputs]
    return call("PagedAttention", arrays, inputs[0].shape, dtype)
