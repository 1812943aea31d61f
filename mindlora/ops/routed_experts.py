"""routed_experts: sends each token through the feed-forward networks that its router chose, for serving on a CPU."""

from mindspore import Tensor
from mindspore.common import dtype as mstype

from mindlora.ops.nf4_linear import WEIGHT_DTYPES, WEIGHT_NAMES
from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_dtypes, check_fixed_dtypes

_NAMES = ("x", "experts", "weights", "slots")
_DTYPES = (mstype.float32, mstype.int32, mstype.float32, mstype.int32)
_POOL_NAMES = ("pool", "ranks", "scales")
_POOL_DTYPES = (mstype.float32, mstype.int32, mstype.float32)


class RoutedExperts(OperatorCell):
    r"""y[t] = sum_j weights[t, j] D_e (silu(G_e x[t]) * (U_e x[t])) with e = experts[t, j].

    Each token may have an adapter, i = slots[t]: then (G_e; U_e) is (G_e; U_e) + scale_i B_ie A_ie, and D_e likewise,
    with its own pairs. MindSpore's GroupedMatmul, with which MindFormers computes them, has no kernel for a CPU. It
    has no gradient. A token gives the same bits regardless of the rest of the batch.

    Inputs:
        - **x** (Tensor) - Shape [..., H], float32; all axes but the last are tokens.
        - **experts** (Tensor) - Shape [tokens, k], int32: the experts of each token.
        - **weights** (Tensor) - Shape [tokens, k], float32: the factor of each expert's output.
        - **gate_up** (Tensor) - Shape [experts, 2 I, H]: the rows of G_e, then those of U_e; float32, float16 or
          bfloat16, widened as it is read.
        - **down** (Tensor) - Shape [experts, H, I]: D_e, dtype of gate_up.
        - **gate_up_pool** (Tensor) - Shape [slots, experts * max_rank, H + 2 I], float32, the pairs on gate_up. In a
          slot of rank r, row e r + j is A_ie[j, :] followed by B_ie[:, j]; rows from experts * r on are never used.
        - **gate_up_ranks** (Tensor) - Shape [slots], int32: the rows in use, experts * r; fewer than experts
          for a slot without pairs.
        - **gate_up_scales** (Tensor) - Shape [slots], float32.
        - **down_pool**, **down_ranks**, **down_scales** (Tensor) - The same for down, whose ranks may differ.
        - **slots** (Tensor) - Shape [at least tokens], int32: the slot of each token, negative for none.

    Outputs:
        Tensor of the shape of x, float32.

    Raises:
        BackendError: The device is not a CPU, the library is not built, or a dtype is not supported.
        RuntimeError: A shape, an expert, a slot or a rank is wrong (raised by the kernel, which names it).

    Source: Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017.
    """

    op = "routed_experts"
    inputs = 12

    def construct(
        self,
        x: Tensor,
        experts: Tensor,
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
        dtypes = x.dtype, experts.dtype, weights.dtype, slots.dtype
        check_fixed_dtypes(self.op, self.path, _NAMES, dtypes, _DTYPES)
        check_dtypes(self.op, self.path, ("gate_up", "down"), (gate_up.dtype, down.dtype))
        gate_up_pairs = gate_up_pool, gate_up_ranks, gate_up_scales
        down_pairs = down_pool, down_ranks, down_scales
        for pool, ranks, scales in (gate_up_pairs, down_pairs):
            dtypes = pool.dtype, ranks.dtype, scales.dtype
            check_fixed_dtypes(self.op, self.path, _POOL_NAMES, dtypes, _POOL_DTYPES)
        return self.kernel(x, experts, weights, gate_up, down, *gate_up_pairs, *down_pairs, slots)


class Nf4RoutedExperts(OperatorCell):
    r"""RoutedExperts with weights in 4-bit NormalFloat, decoded inside the products.

    Inputs:
        - **x**, **experts**, **weights** (Tensor) - As in RoutedExperts.
        - **gate_up**, **gate_up_absmax**, **gate_up_scales**, **gate_up_offsets** (Tensor) - The matrix [experts * H,
          2 I] of all (G_e; U_e)^T, quantized by mindlora.core.numerics.nf4.quantize.
        - **down**, **down_absmax**, **down_scales**, **down_offsets** (Tensor) - The matrix of all D_e^T,
          [experts * I, H].
        - **gate_up_pool**, **gate_up_ranks**, **gate_up_scale**, **down_pool**, **down_ranks**, **down_scale**,
          **slots** (Tensor) - As in RoutedExperts, which calls the scales of adapters gate_up_scales and down_scales.

    Outputs:
        Tensor of the shape of x, float32.

    Raises:
        BackendError: As in RoutedExperts.
        RuntimeError: As in RoutedExperts.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    op = "routed_experts"
    inputs = 18

    def __init__(self):
        super().__init__()
        self.kernel = CpuKernel("Nf4RoutedExperts", self.inputs)

    def construct(
        self,
        x: Tensor,
        experts: Tensor,
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
        dtypes = x.dtype, experts.dtype, weights.dtype, slots.dtype
        check_fixed_dtypes(self.op, self.path, _NAMES, dtypes, _DTYPES)
        gate_up_weight = gate_up, gate_up_absmax, gate_up_scales, gate_up_offsets
        down_weight = down, down_absmax, down_scales, down_offsets
        for codes, absmax, scales, offsets in (gate_up_weight, down_weight):
            dtypes = codes.dtype, absmax.dtype, scales.dtype, offsets.dtype
            check_fixed_dtypes(self.op, self.path, WEIGHT_NAMES, dtypes, WEIGHT_DTYPES)
        gate_up_pairs = gate_up_pool, gate_up_ranks, gate_up_scale
        down_pairs = down_pool, down_ranks, down_scale
        for pool, ranks, scales in (gate_up_pairs, down_pairs):
            dtypes = pool.dtype, ranks.dtype, scales.dtype
            check_fixed_dtypes(self.op, self.path, _POOL_NAMES, dtypes, _POOL_DTYPES)
        return self.kernel(x, experts, weights, *gate_up_weight, *down_weight, *gate_up_pairs, *down_pairs, slots)
