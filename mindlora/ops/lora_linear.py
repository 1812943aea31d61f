"""lora_linear: a frozen linear layer and its low-rank path in one pass over the weight, for few tokens."""

from typing import Optional, Tuple, Union

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.ops.operator_cell import OperatorCell, Products, check_dtypes, current_cell

_NAMES = ("x", "W", "A", "B", "bias")


class LoraLinear(OperatorCell):
    r"""y = x W^T + ((x A^T) * scale) B^T, with gradients for x, A, B and scale.

    W is frozen: its gradient is zero and costs no product.
    With D = (dy B) * scale: dx = dy W + D A, dA = D^T x, dB = dy^T ((x A^T) * scale).

    Inputs:
        - **x** (Tensor) - Shape [tokens, K]; float32, float16 or bfloat16. All sums are in float32 on a CPU.
        - **w** (Tensor) - Shape [N, K], dtype of x.
        - **a** (Tensor) - Shape [r, K], dtype of x; r is 1 to 256, any on the composed path.
        - **b** (Tensor) - Shape [N, r], dtype of x.
        - **scale** (Tensor) - One number, float32.

    Outputs:
        Tensor [tokens, N] of the dtype of x.

    Raises:
        BackendError: MINDLORA_BACKEND asks for a path that is not available, or a dtype is not supported.
        RuntimeError: A shape or rank is wrong (raised by MindSpore or by the kernel, which names it).

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    op = "lora_linear"
    inputs = 5

    def __init__(self):
        super().__init__()
        self.products = Products()

    def construct(self, x: Tensor, w: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, _NAMES, (x.dtype, w.dtype, a.dtype, b.dtype))
        if self.path == "cpu":
            return self.kernel(x, w, a, b, scale)
        if self.path == "ascend":
            # On an NPU, ops.Custom cannot omit an input: a matrix in place of the bias means that the kernel adds none.
            return self.kernel(x, w, a, b, scale, b)
        return ops.cast(self.composed(x, w, a, b, scale), x.dtype)

    def composed(self, x: Tensor, w: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        """The equation in plain operators, [tokens, N], in the dtype in which products are computed."""
        low = self.products.scaled(self.products.times_transposed(x, a), scale)
        return self.products.times_transposed(x, w) + self.products.times_transposed(low, b)

    def grad(self, dout: Tensor, x: Tensor, w: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tuple[Tensor, ...]:
        """The gradients for x, w (all zero), a, b and scale, from the gradient ``dout`` [tokens, N] of y."""
        dx, da, db, dscale = self.products.low_rank_grad(dout, x, a, b, scale)
        dx = self.products.sum_as(dx, self.products.times(dout, w))
        # MindSpore 2.7 has no bfloat16 ZerosLike on a CPU.
        dw = ops.cast(ops.zeros_like(self.products.wide(w)), w.dtype)
        return dx, dw, da, db, dscale

    def bprop(
        self, x: Tensor, w: Tensor, a: Tensor, b: Tensor, scale: Tensor, out: Tensor, dout: Tensor
    ) -> Tuple[Tensor, ...]:
        return self.grad(dout, x, w, a, b, scale)


class LoraLinearWithBias(LoraLinear):
    r"""y = x W^T + bias + ((x A^T) * scale) B^T: LoraLinear with one more input and its gradient.

    Inputs:
        - **x**, **w**, **a**, **b**, **scale** - As in LoraLinear.
        - **bias** (Tensor) - Shape [N], dtype of x.

    Outputs:
        Tensor [tokens, N] of the dtype of x.
    """

    inputs = 6

    def construct(self, x: Tensor, w: Tensor, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, _NAMES, (x.dtype, w.dtype, a.dtype, b.dtype, bias.dtype))
        if self.path != "composed":
            return self.kernel(x, w, a, b, scale, bias)
        return ops.cast(self.composed(x, w, a, b, scale) + self.products.wide(bias), x.dtype)

    def bprop(
        self, x: Tensor, w: Tensor, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, out: Tensor, dout: Tensor
    ) -> Tuple[Tensor, ...]:
        return self.grad(dout, x, w, a, b, scale) + (self.products.bias_grad(dout, bias),)


@constexpr
def _cell(has_bias):
    return current_cell(LoraLinearWithBias if has_bias else LoraLinear)


def lora_linear(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, scale: Union[float, Tensor], bias: Optional[Tensor] = None
) -> Tensor:
    r"""Returns the result of LoraLinear, y = x W^T (+ bias) + ((x A^T) * scale) B^T, reading W once.

    Args:
        x, w, a, b (Tensor): As the inputs of LoraLinear.
        scale (float or Tensor): One number.
        bias (Tensor): Shape [N], dtype of x. Default: None.
    """
    scale = ops.cast(scale, mstype.float32)
    if bias is None:
        return _cell(False)(x, w, a, b, scale)
    return _cell(True)(x, w, a, b, scale, bias)
