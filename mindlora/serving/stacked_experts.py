"""The experts of a layer that is served: their weights in float or in NF4, and a pool of adapters for each."""

from typing import Dict

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer

from mindlora.core.numerics.nf4 import TENSOR_NAMES
from mindlora.network.quantized.nf4 import packed_parameters
from mindlora.network.serving.multi_lora_dense import MultiLoRAExperts
from mindlora.network.tensors import to_array, to_tensor
from mindlora.ops.routed_experts import Nf4RoutedExperts, RoutedExperts
from mindlora.serving.grouped_experts import GroupedExperts, Nf4GroupedExperts, check_slots
from mindlora.serving.mcore_operators import Dtypes, on_cpu

WEIGHTS = ("gate_up_proj", "down_proj")


class StackedExperts(nn.Cell):
    """The weights of a layer's experts, as transformers stacks them, and after add_pools a pool of adapters for each.

    Attributes:
        shapes (dict): A weight's name in this cell, one of WEIGHTS -> (experts, out, in).
        dtype (mindspore.dtype): That in which they compute.
    """

    def __init__(self, experts: int, hidden: int, inner: int, dtypes: Dtypes):
        super().__init__()
        self.shapes = dict(zip(WEIGHTS, ((experts, 2 * inner, hidden), (experts, hidden, inner))))
        self.dtype = dtypes.compute
        self.gate_up_proj, self.down_proj = (
            Parameter(initializer("zeros", list(shape), dtypes.linear), name=name, requires_grad=False)
            for name, shape in self.shapes.items()
        )
        self.compute = RoutedExperts() if on_cpu() else GroupedExperts()

    def add_pools(self, slots: int, max_rank: int, slots_of_tokens: Parameter) -> Dict[str, MultiLoRAExperts]:
        """Puts a pool of adapters beside each weight, which must have been loaded; returns name -> pool.

        Raises ConfigError if there cannot be so many slots.
        """
        if not on_cpu():
            check_slots(slots, self.shapes["down_proj"][0])
            self.transpose_weights()
        pools = {
            name: MultiLoRAExperts(getattr(self, name).name, shape, slots, max_rank, self.dtype)
            for name, shape in self.shapes.items()
        }
        # Straight into _cells: assigning an attribute would rename the pools' parameters.
        self._cells.update({f"{name}_pool": pool for name, pool in pools.items()})
        self.slots_of_tokens = slots_of_tokens
        return pools

    def transpose_weights(self) -> None:
        """Makes the weights [experts, in, out], as GroupedMatmul takes them."""
        for name in self.shapes:
            weight = getattr(self, name)
            transposed = to_tensor(np.ascontiguousarray(to_array(weight).swapaxes(1, 2)))
            weight.set_data(transposed, slice_shape=True)

    def construct(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj_pool, self.down_proj_pool
        return self.compute(
            x,
            chosen,
            weights,
            self.gate_up_proj,
            self.down_proj,
            gate_up.lora_pool,
            gate_up.lora_ranks,
            gate_up.lora_scales,
            down.lora_pool,
            down.lora_ranks,
            down.lora_scales,
            self.slots_of_tokens,
        )


class Nf4StackedExperts(StackedExperts):
    """StackedExperts whose weights are [experts * in, out] in 4 bits, as training holds them (see NF4ExpertWeight).

    Args:
        cell (StackedExperts): The cell whose place it takes, without values.
        path (str): That of the cell.
    """

    def __init__(self, cell: StackedExperts, path: str):
        nn.Cell.__init__(self)
        self.shapes, self.dtype = cell.shapes, cell.dtype
        for name, (experts, rows, columns) in self.shapes.items():
            whole = f"{path}.{name}"
            transposed = Parameter(initializer("zeros", [experts, columns, rows], mstype.float32), name=whole)
            for leaf, parameter in packed_parameters(transposed, whole, whole).items():
                setattr(self, name + leaf.removeprefix(TENSOR_NAMES["codes"]), parameter)
        _, hidden, inner = self.shapes["down_proj"]
        self.compute = Nf4RoutedExperts() if on_cpu() else Nf4GroupedExperts(hidden, inner, self.dtype)

    def transpose_weights(self) -> None:
        """Leaves them: what is quantized is [experts * in, out]."""

    def construct(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj_pool, self.down_proj_pool
        return self.compute(
            x,
            chosen,
            weights,
            self.gate_up_proj,
            self.gate_up_proj_absmax,
            self.gate_up_proj_scales,
            self.gate_up_proj_offsets,
            self.down_proj,
            self.down_proj_absmax,
            self.down_proj_scales,
            self.down_proj_offsets,
            gate_up.lora_pool,
            gate_up.lora_ranks,
            gate_up.lora_scales,
            down.lora_pool,
            down.lora_ranks,
            down.lora_scales,
            self.slots_of_tokens,
        )
