"""rms_norm: each row divided by its root mean square, for serving on a CPU."""

from mindspore import Tensor
from mindspore.common import dtype as mstype

from mindlora.ops.operator_cell import OperatorCell, check_dtypes, check_fixed_dtypes


class RmsNorm(OperatorCell):
    r"""y = x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    This is MindSpore's RmsNorm, which has no kernel for a CPU. It has no gradient.

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

    def construct(self, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("x", "weight"), (x.dtype, weight.dtype))
        check_fixed_dtypes(self.op, self.path, ("eps",), (eps.dtype,), (mstype.float32,))
        return self.kernel(x, weight, eps)
