"""rms_norm: each row divided by its root mean square, on a CPU."""

from typing import Tuple

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype

from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_dtypes, check_fixed_dtypes


class RmsNorm(OperatorCell):
    r"""y = x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    This is MindSpore's RmsNorm, which has no kernel for a CPU. With r = 1 / sqrt(mean(x^2) + eps) the gradients are

    dx = r * (w - r^2 x mean(w x)), w = dy * weight; dweight = the sum of dy * x * r over the rows.

    x and weight are kept for them, and nothing else: r is computed again.

    Inputs:
        - **x** (Tensor) - Shape [..., H]; float32, float16 or bfloat16. Sums are in float32.
        - **weight** (Tensor) - Shape [H], dtype of x.
        - **eps** (Tensor) - Shape [1], float32.

    Outputs:
        Tensor of the shape and dtype of x.

    Raises:
        BackendError: The device is not a CPU, the library is not built, or a dtype is not supported.
        RuntimeError: A shape is wrong (raised by the kernel, which names it).

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    op = "rms_norm"
    inputs = 3

    def __init__(self):
        super().__init__()
        self.grad_kernel = CpuKernel("RmsNormGrad", 4)
        self.weight_grad_kernel = CpuKernel("RmsNormWeightGrad", 4)

    def construct(self, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("x", "weight"), (x.dtype, weight.dtype))
        check_fixed_dtypes(self.op, self.path, ("eps",), (eps.dtype,), (mstype.float32,))
        return self.kernel(x, weight, eps)

    def bprop(self, x: Tensor, weight: Tensor, eps: Tensor, out: Tensor, dout: Tensor) -> Tuple[Tensor, ...]:
        dx = self.grad_kernel(dout, x, weight, eps)
        return dx, self.weight_grad_kernel(dout, x, weight, eps), ops.zeros_like(eps)
