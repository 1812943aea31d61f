"""The experts of a served layer: their weights in float or in NF4, and a pool of adapters for each."""

from typing import Dict, List, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.nf4 import TENSOR_NAMES
from mindlora.network.quantized.nf4 import DecodedWeight, packed_parameters
from mindlora.network.serving.multi_lora_dense import MultiLoRAExperts
from mindlora.network.tensors import to_array, to_tensor
from mindlora.ops.multi_lora_delta import MultiLoraDelta
from mindlora.ops.routed_experts import Nf4RoutedExperts, RoutedExperts
from mindlora.serving.mcore_operators import Dtypes, on_cpu

WEIGHTS = ("gate_up_proj", "down_proj")
# The limits of multi_lora_delta on Atlas A2 and A3: ops/multi_lora_delta/README.md.
_MOST_SLOTS = 8638


class StackedExperts(nn.Cell):
    """The weights of a layer's experts, stacked as in transformers, and after add_pools a pool of adapters for each.

    Attributes:
        shapes (dict): A weight's name in this cell, one of WEIGHTS -> (experts, out, in).
        dtype (mindspore.dtype): The dtype in which they compute.
    """

    def __init__(self, experts: int, hidden: int, inner: int, dtypes: Dtypes):
        super().__init__()
        self.shapes = dict(zip(WEIGHTS, ((experts, 2 * inner, hidden), (experts, hidden, inner))))
        self.dtype = dtypes.compute
        self.gate_up_proj, self.down_proj = (
            Parameter(initializer("zeros", self.held_shape(*shape), dtypes.linear), name=name, requires_grad=False)
            for name, shape in self.shapes.items()
        )
        self.on_cpu = on_cpu()
        self.compute = RoutedExperts() if self.on_cpu else GroupedExperts()

    def held_shape(self, experts: int, rows: int, columns: int) -> List[int]:
        """Returns the shape in which a weight [experts, out, in] is held."""
        return [experts, rows, columns]

    def add_pools(self, slots: int, max_rank: int, slots_of_tokens: Parameter) -> Dict[str, MultiLoRAExperts]:
        """Puts a pool of adapters beside each weight, which must have been loaded; returns name -> pool.

        Raises ConfigError if there are too many slots.
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
        """Transposes the weights to [experts, in, out], for GroupedMatmul."""
        for name in self.shapes:
            weight = getattr(self, name)
            transposed = to_tensor(np.ascontiguousarray(to_array(weight).swapaxes(1, 2)))
            weight.set_data(transposed, slice_shape=True)

    def held_weights(self) -> Tuple[Tensor, ...]:
        """Returns both weights as they go into the operator that computes."""
        return self.gate_up_proj, self.down_proj

    def construct(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj_pool, self.down_proj_pool
        return self.compute(
            x,
            chosen,
            weights,
            *self.held_weights(),
            gate_up.lora_pool,
            gate_up.lora_ranks,
            gate_up.lora_scales,
            down.lora_pool,
            down.lora_ranks,
            down.lora_scales,
            self.slots_of_tokens,
        )


class TransposedExperts(StackedExperts):
    """StackedExperts whose weights are [experts * in, out], as training holds them."""

    def held_shape(self, experts: int, rows: int, columns: int) -> List[int]:
        """Returns [experts * in, out]."""
        return [experts * columns, rows]

    def transpose_weights(self) -> None:
        """Leaves them: they are transposed."""

    def held_weights(self) -> Tuple[Tensor, ...]:
        """Returns both weights as they go into the operator that computes."""
        if self.on_cpu:
            return self.gate_up_proj, self.down_proj
        gate_up, down = self.shapes["gate_up_proj"], self.shapes["down_proj"]
        return (
            ops.reshape(self.gate_up_proj, (gate_up[0], gate_up[2], gate_up[1])),
            ops.reshape(self.down_proj, (down[0], down[2], down[1])),
        )


class Nf4StackedExperts(StackedExperts):
    """StackedExperts whose weights are [experts * in, out] in 4 bits, as in training (see NF4ExpertWeight).

    Args:
        cell (StackedExperts): The cell that it replaces, without values.
        path (str): The cell's path.
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
        """Leaves them: quantized weights are [experts * in, out]."""

    def held_weights(self) -> Tuple[Tensor, ...]:
        """Returns both weights as they go into the operator that computes."""
        return (
            self.gate_up_proj,
            self.gate_up_proj_absmax,
            self.gate_up_proj_scales,
            self.gate_up_proj_offsets,
            self.down_proj,
            self.down_proj_absmax,
            self.down_proj_scales,
            self.down_proj_offsets,
        )


def check_slots(slots: int, experts: int) -> None:
    """Raises ConfigError for more slots than GroupedExperts supports with so many experts."""
    if slots * experts > _MOST_SLOTS:
        raise ConfigError(
            f"slots is {slots} and each layer has {experts} experts: multi_lora_delta takes up to {_MOST_SLOTS} slots "
            "on an NPU, and each expert of an adapter is one. Serve with up to "
            f"{_MOST_SLOTS // experts} slots (--slots)."
        )


class GroupedExperts(nn.Cell):
    r"""y[t] = sum_j weights[t, j] D_e (silu(G_e x[t]) * (U_e x[t])) with e = chosen[t, j]; adapters: see RoutedExperts.

    The rows of x are sorted by expert, so that one product takes a whole weight. Pairs are added to
    them by multi_lora_delta, for which each expert of a slot is a separate slot.

    Inputs:
        - **x** (Tensor) - [T, H], float16 or bfloat16.
        - **chosen** (Tensor) - [T, k], int32: the experts of each token.
        - **weights** (Tensor) - [T, k], float32: the factor of each expert's output, applied in the dtype of x.
        - **gate_up** (Tensor) - [experts, H, 2 I]: the columns of G_e^T, then those of U_e^T; dtype of x.
        - **down** (Tensor) - [experts, I, H]: D_e^T, dtype of x.
        - **gate_up_pool** (Tensor) - [slots, experts * max_rank, H + 2 I], dtype of x, the pairs on gate_up. Row
          e max_rank + j is A_ie[j, :] followed by B_ie[:, j]; rows beyond the rank of A_ie are zeros.
        - **gate_up_ranks** (Tensor) - [slots], int32: experts * max_rank, or fewer than experts for a slot without
          pairs.
        - **gate_up_scales** (Tensor) - [slots], float32.
        - **down_pool**, **down_ranks**, **down_scales** (Tensor) - The same for down.
        - **slots** (Tensor) - [at least T], int32: the slot of each token, negative for none.

    Outputs:
        Tensor [T, H], dtype of x.
    """

    def __init__(self):
        super().__init__()
        self.route = ops.auto_generate.MoeInitRoutingV2()
        self.product = ops.auto_generate.GroupedMatmulV4()
        self.combine = ops.auto_generate.MoeTokenUnpermute()
        self.sort = ops.auto_generate.SortExt()
        self.delta = MultiLoraDelta()
        self.silu = nn.SiLU()

    def construct(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_pool: Tensor,
        gate_up_ranks: Tensor,
        gate_up_scales: Tensor,
        down_pool: Tensor,
        down_ranks: Tensor,
        down_scales: Tensor,
        slots: Tensor,
    ) -> Tensor:
        experts = gate_up.shape[0]
        # places[t k + j] is the row of token t for its j-th expert; counts are the rows of each expert.
        rows, places, counts, _ = self.route(x, chosen, 0, 0, experts, 0, 2, True)
        counts = ops.cast(counts, mstype.int64)
        indices = self.slots_of_rows(slots, chosen, places, experts)
        both = self.linear(rows, gate_up, counts, (gate_up_pool, gate_up_ranks, gate_up_scales), indices)
        inner = both.shape[1] // 2
        gate, up = ops.narrow(both, 1, 0, inner), ops.narrow(both, 1, inner, inner)
        y = self.linear(self.silu(gate) * up, down, counts, (down_pool, down_ranks, down_scales), indices)
        return self.combine(y, places, ops.cast(weights, y.dtype), False, None)

    def slots_of_rows(self, slots: Tensor, chosen: Tensor, places: Tensor, experts: int) -> Tensor:
        """The slot of each row in pools [slots * experts, max_rank, ...], negative for none."""
        slots = ops.expand_dims(ops.slice(slots, (0,), (chosen.shape[0],)), 1)
        slots = ops.broadcast_to(slots, chosen.shape)
        of_experts = ops.select(slots < 0, slots, slots * experts + chosen)
        # The places of a permutation in ascending order are its inverse.
        _, sources = self.sort(places)
        return ops.gather(ops.reshape(of_experts, (-1,)), sources, 0)

    def linear(
        self, x: Tensor, weight: Tensor, counts: Tensor, pairs: Tuple[Tensor, Tensor, Tensor], indices: Tensor
    ) -> Tensor:
        """x W_e and the pairs of each row's adapter; weight [experts, in, out]."""
        y = self.product([x], [weight], None, None, None, None, None, None, counts, None, None, None, 3, 0, 1)[0]
        pool, ranks, scales = pairs
        experts = weight.shape[0]
        pool = ops.reshape(pool, (-1, pool.shape[1] // experts, pool.shape[2]))
        ranks, scales = self.of_each_expert(ranks // experts, experts), self.of_each_expert(scales, experts)
        return self.delta(y, x, pool, ranks, scales, indices)

    def of_each_expert(self, of_slots: Tensor, experts: int) -> Tensor:
        """Repeats numbers [slots] for each expert, [slots * experts]."""
        wide = ops.broadcast_to(ops.expand_dims(of_slots, 1), (of_slots.shape[0], experts))
        return ops.reshape(wide, (-1,))


class Nf4GroupedExperts(nn.Cell):
    """GroupedExperts with weights in 4-bit NormalFloat, as in Nf4RoutedExperts: decoded once in each step.

    Args:
        hidden, inner (int): H and I.
        dtype (mindspore.dtype): The dtype of x.
    """

    def __init__(self, hidden: int, inner: int, dtype: mstype.Type):
        super().__init__()
        self.decode_gate_up = DecodedWeight(hidden, 2 * inner, dtype)
        self.decode_down = DecodedWeight(inner, hidden, dtype)
        self.experts = GroupedExperts()

    def construct(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        gate_up_absmax: Tensor,
        gate_up_scales: Tensor,
        gate_up_offsets: Tensor,
        down: Tensor,
        down_absmax: Tensor,
        down_scales: Tensor,
        down_offsets: Tensor,
        gate_up_pool: Tensor,
        gate_up_ranks: Tensor,
        gate_up_scale: Tensor,
        down_pool: Tensor,
        down_ranks: Tensor,
        down_scale: Tensor,
        slots: Tensor,
    ) -> Tensor:
        return self.experts(
            x,
            chosen,
            weights,
            self.decode_gate_up(x, gate_up, gate_up_absmax, gate_up_scales, gate_up_offsets),
            self.decode_down(x, down, down_absmax, down_scales, down_offsets),
            gate_up_pool,
            gate_up_ranks,
            gate_up_scale,
            down_pool,
            down_ranks,
            down_scale,
            slots,
        )
