"""What RoutedExperts computes, by MindSpore's own operators on Ascend, as MindFormers' inference of Qwen3-MoE does."""

from typing import Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError
from mindlora.network.quantized.nf4_experts import DecodedWeight
from mindlora.ops.multi_lora_delta import MultiLoraDelta

# The limits of multi_lora_delta on Atlas A2 and A3: ops/multi_lora_delta/README.md.
_MOST_SLOTS = 8638


def check_slots(slots: int, experts: int) -> None:
    """Raises ConfigError for more slots than GroupedExperts can have, beside so many experts."""
    if slots * experts > _MOST_SLOTS:
        raise ConfigError(
            f"slots is {slots} and each layer has {experts} experts: multi_lora_delta takes up to {_MOST_SLOTS} slots "
            "on an NPU, and each expert of an adapter is one. Serve with up to "
            f"{_MOST_SLOTS // experts} slots (--slots)."
        )


class GroupedExperts(nn.Cell):
    r"""y[t] = sum_j weights[t, j] D_e (silu(G_e x[t]) * (U_e x[t])) with e = chosen[t, j]; adapters: see RoutedExperts.

    The rows of x are put in the order of their experts, so that one product takes all of a weight. Pairs are added to
    them by multi_lora_delta, for which each expert of a slot is a slot of its own.

    Inputs:
        - **x** (Tensor) - [T, H], float16 or bfloat16.
        - **chosen** (Tensor) - [T, k], int32: the experts of each token.
        - **weights** (Tensor) - [T, k], float32: what each one's output is multiplied by, in the dtype of x.
        - **gate_up** (Tensor) - [experts, H, 2 I]: the columns of G_e^T, then those of U_e^T; dtype of x.
        - **down** (Tensor) - [experts, I, H]: D_e^T, dtype of x.
        - **gate_up_pool** (Tensor) - [slots, experts * max_rank, H + 2 I], dtype of x, the pairs on gate_up. Row
          e max_rank + j is A_ie[j, :] followed by B_ie[:, j]; those beyond the rank of A_ie are zeros.
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
        """Numbers [slots] as [slots * experts]."""
        wide = ops.broadcast_to(ops.expand_dims(of_slots, 1), (of_slots.shape[0], experts))
        return ops.reshape(wide, (-1,))


class Nf4GroupedExperts(nn.Cell):
    """GroupedExperts with weights in 4-bit NormalFloat, as in Nf4RoutedExperts: decoded once in each step.

    Args:
        hidden, inner (int): H and I.
        dtype (mindspore.dtype): That of x.
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
