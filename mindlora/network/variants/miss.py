"""MiSSDense: a linear cell that adds up shards of its input and multiplies the sum by one trained matrix."""

from typing import Tuple

import numpy as np
from mindspore import ops

from mindlora.models.variants.miss import MISS
from mindlora.network.cells.dense import LoRADense


class MiSSDense(LoRADense):
    r"""A linear cell with a low-rank update by one block, which all shards of the input share.

    .. math::
        y = activation(x W^T + bias + (\sum_s dropout(x)_s) D^T)

    x is divided into shards x_s of r elements, the last one filled with zeros. The block D is initialized to zero, so
    that the cell computes the same as the plain one until it trains. Only D trains, out_channels * r numbers. The
    update of W is D in each shard of the columns, and its scale is 1. The fused operators do not support this cell.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], mindpet_delta_lora_miss_block [out_channels, r].

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Source: Kang et al., MiSS: Revisiting the Trade-off in LoRA with an Efficient Shard-Sharing Structure, 2025.
    """

    variant = MISS
    not_fused = "MiSS adds up shards of x and multiplies them by no A"

    def _add_adapter(self, config, shared):
        self._add_parts(self._drawn(config, {"block": "zeros"}))
        missing = -self.in_channels % self.lora_rank
        self.is_filled = missing == 0
        self.shards = (self.in_channels + missing) // self.lora_rank
        self.fill = ops.Pad(((0, 0), (0, missing)))
        self.reshape = ops.Reshape()
        self.sum_shards = ops.ReduceSum()
        self.expand = ops.MatMul(transpose_b=True)
        self.add = ops.Add()

    def _adapted(self, x):
        """x W^T + bias + (sum of the shards of dropout(x)) D^T."""
        y = self.base.linear(x, self._operands(), self.bias)
        x = self.low_rank.drop(x)
        x = x if self.is_filled else self.fill(x)
        low_rank = self.sum_shards(self.reshape(x, (-1, self.shards, self.lora_rank)), 1)
        return self.add(y, self.expand(low_rank, self.trained.of(self.mindpet_delta_lora_miss_block)))

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        block = self.mindpet_delta_lora_miss_block.asnumpy().astype(np.float32)
        a, b = MISS.pair_of_parts({"block": block})
        return MISS.columns_of(a, self.in_channels), b

    def load_part(self, part: str, array: np.ndarray) -> None:
        # A and B follow from the block.
        if part == "block":
            super().load_part(part, array)
