"""routed_experts: each token through the feed-forward networks that its router chose, for serving on a CPU."""

from mindspore import Tensor
from mindspore.common import dtype as mstype

from mindlora.ops.operator_cell import OperatorCell, check_dtypes, check_fixed_dtypes

_NAMES = ("x", "experts", "weights")
_DTYPES = (mstype.float32, mstype.int32, mstype.float32)


class RoutedExperts(OperatorCell):
    r"""y[t] = sum_j weights[t, j] D_e (silu(G_e x[t]) * (U_e x[t])) with e = experts[t, j].

    MindSpore's GroupedMatmul, by which MindFormers computes them, has no kernel for a CPU. It has no gradient. A token
    gives the same bits whatever else is in the batch.

    Inputs:
        - **x** (Tensor) - Shape [..., H], float32; all axes but the last are tokens.
        - **experts** (Tensor) - Shape [tokens, k], int32: the experts of each token.
        - **weights** (Tensor) - Shape [tokens, k], float32: what each one's output is multiplied by.
        - **gate_up** (Tensor) - Shape [experts, 2 I, H]: the rows of G_e, then those of U_e; float32, float16 or
          bfloat16, widened as it is read.
        - **down** (Tensor) - Shape [experts, H, I]: D_e, dtype of gate_up.

    Outputs:
        Tensor of the shape of x, float32.

    Raises:
        BackendError: The device is not a CPU, the library is not built, or a dtype is not supported.
        RuntimeError: A shape or an expert is wrong (raised by the kernel, which names it).

    Source: Shazeer et al., Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer, 2017.
    """

    op = "routed_experts"
    inputs = 5

    def construct(self, x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        check_fixed_dtypes(self.op, self.path, _NAMES, (x.dtype, experts.dtype, weights.dtype), _DTYPES)
        check_dtypes(self.op, self.path, ("gate_up", "down"), (gate_up.dtype, down.dtype))
        return self.kernel(x, experts, weights, gate_up, down)
