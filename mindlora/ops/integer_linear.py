"""integer_linear: a frozen linear layer whose weight is in integers of 4 or 8 bits, decoded inside the product."""

from typing import Any, Callable, Tuple

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype

from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_dtypes, check_fixed_dtypes


class IntegerLinear(OperatorCell):
    r"""y = x W^T with W = (codes - zeros) * scales of each group of columns, and dx = dy W. W gets no gradient.

    mindlora.core.numerics.integers defines the three tensors. W is never held whole: about 0.3 MB at a time in each
    thread. It runs on a CPU.

    Args:
        bits (int): Bits of a code, 4 or 8.

    Inputs:
        - **x** (Tensor) - Shape [tokens, K]; float32, float16 or bfloat16. All sums are in float32.
        - **codes** (Tensor) - Shape [N, K * bits / 8], uint8; K is a multiple of 64.
        - **zeros** (Tensor) - Shape [N, groups], uint8.
        - **scales** (Tensor) - Shape [N, groups]; float32, float16 or bfloat16.

    Outputs:
        Tensor [tokens, N] of the dtype of x.

    Raises:
        BackendError: The device is not a CPU, the library is missing, or a dtype is not supported.
        RuntimeError: A shape is wrong (raised by the kernel, which names it).

    Source: Frantar et al., GPTQ, 2023; Dettmers et al., LLM.int8(), 2022, for such weights.
    """

    op = "integer_linear"
    inputs = 4

    def __init__(self, bits: int):
        super().__init__()
        self.bits = bits
        grad_kernel = CpuKernel(f"Int{bits}LinearGrad", self.inputs)
        self.kernel = CpuKernel(f"Int{bits}Linear", self.inputs, bprop=_gradient(grad_kernel))

        self.norms_kernel = CpuKernel(f"Int{bits}SquaredNorms", self.inputs)
        self.vector = Tensor([0], mstype.float32)

    def construct(self, x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("x",), (x.dtype,))
        check_dtypes(self.op, self.path, ("scales",), (scales.dtype,))
        dtypes = codes.dtype, zeros.dtype
        check_fixed_dtypes(self.op, self.path, ("codes", "zeros"), dtypes, (mstype.uint8, mstype.uint8))
        return self.kernel(x, codes, zeros, scales)

    def squared_norms(self, after: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        """||W||^2 of each row, float32 [N], added up as W is decoded; ``after`` is not needed (see Nf4Linear)."""
        return self.norms_kernel(self.vector, codes, zeros, scales)


def _gradient(kernel: CpuKernel) -> Callable[..., Tuple[Any, ...]]:
    """Returns the bprop of a product, whose gradient ``kernel`` computes; the primitive's, as in FrozenLinear."""

    def bprop(x, codes, zeros, scales, out, dout):
        dx = kernel(dout, codes, zeros, scales)
        return dx, ops.zeros_like(codes), ops.zeros_like(zeros), ops.zeros_like(scales)

    return bprop
