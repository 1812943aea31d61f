"""MiSS: one trained matrix is shared by all shards of a cell's inputs (Kang et al., 2025)."""

from typing import Mapping

import numpy as np

from mindlora.core.numerics.dtypes import from_float32
from mindlora.core.numerics.pair_shapes import Pair
from mindlora.models.variants.variant import NOT_LINEAR, SHARDED, Part, Variant


class MiSS(Variant):
    """The inputs are divided into shards of r and summed, which equals a pair whose A is [I, I, ...]."""

    name = "MiSS"
    field = "use_miss"
    unsupported_on = {
        **dict.fromkeys(NOT_LINEAR, "its shards are those of the inputs of a linear cell"),
        SHARDED: "each device would sum shards of its own inputs",
    }
    excludes = (
        *("use_rslora", "freeze_lora_a", "rank_pattern", "alpha_pattern"),
        *("lora_init", "lora_a_init", "lora_b_init"),
    )
    no_scale = "MiSS has no scale"
    own_pair = False
    factors = ("block",)
    parts = (Part("block", "mindpet_delta_lora_miss_block", ".miss_block", size="out, r", turned=True),)
    zero_part = "block"
    tensors = "MiSS blocks"
    report = "yes: a block for each cell; below, the norms are those of one shard of the inputs"
    cannot_combine = "blocks of different ranks divide the inputs into different shards"

    def pair_of_parts(self, parts: Mapping[str, np.ndarray]) -> Pair:
        """Returns A for one shard, which is the identity, and the block as B."""
        block = parts["block"]
        return from_float32(np.eye(block.shape[1], dtype=np.float32), block.dtype), block

    def columns_of(self, a: np.ndarray, in_channels: int) -> np.ndarray:
        """Returns the identity repeated over all inputs: column i adds input i to element i modulo r."""
        return np.ascontiguousarray(a[:, np.arange(in_channels) % len(a)])


MISS = MiSS()
