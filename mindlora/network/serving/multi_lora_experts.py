"""MultiLoRAExperts: a pool of adapters of one stacked weight of routed experts."""

from typing import Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer


class MultiLoRAExperts(nn.Cell):
    r"""Holds A_ie and B_ie of each slot i and expert e, for W_e + scale_i B_ie A_ie.

    It computes nothing itself: mindlora.ops.routed_experts does, and on Ascend GroupedExperts. On a CPU the pool takes
    memory only where an adapter has been written.

    Weights:
        lora_pool [slots, experts * max_rank, in_channels + out_channels], lora_ranks [slots] int32 and lora_scales
        [slots] float32, which multi_lora_slot_write fills (layout: RoutedExperts, GroupedExperts). A slot of fewer rows
        than experts is empty.

    Args:
        name (str): Of the base's weight.
        shape (tuple): [experts, out_channels, in_channels] of it.
        slots (int): How many adapters the pool holds at once.
        max_rank (int): The largest rank of an adapter.
        dtype (mindspore.dtype): That of the pool, in which the experts compute; float32 on a CPU.
    """

    def __init__(self, name: str, shape: Tuple[int, int, int], slots: int, max_rank: int, dtype: mstype.Type):
        super().__init__()
        self.experts, self.out_channels, self.in_channels = shape
        self.dtype = dtype
        pool = (slots, self.experts * max_rank, self.in_channels + self.out_channels)
        self.lora_pool = _zeros(f"{name}.lora_pool", pool, dtype)
        if ms.get_context("device_target") == "CPU":
            # The zeros of NumPy have no memory until they are written to: a pool can be larger than the model.
            self.lora_pool.set_data(Tensor.from_numpy(np.zeros(pool, np.float32)))
        self.lora_ranks = _zeros(f"{name}.lora_ranks", (slots,), mstype.int32)
        self.lora_scales = _zeros(f"{name}.lora_scales", (slots,), mstype.float32)


def _zeros(name, shape, dtype):
    return Parameter(initializer("zeros", list(shape), dtype), name=name, requires_grad=False)
