"""lora_delta: the low-rank path of a linear layer, added to the output of the frozen layer."""

from typing import Tuple, Union

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.ops.operator_cell import OperatorCell, Products, check_dtypes, current_cell

_NAMES = ("y0", "x", "A", "B")


class LoraDelta(OperatorCell):
    r"""y = y0 + ((x A^T) * scale) B^T, with gradients for every input.

    The backward computes x A^T again, which costs less than keeping it until then. With D = (dy B) * scale: dy0 = dy,
    dx = D A, dA = D^T x, dB = dy^T ((x A^T) * scale).

    Inputs:
        - **y0** (Tensor) - Shape [tokens, N]; float32, float16 or bfloat16. All sums are in float32 on a CPU.
        - **x** (Tensor) - Shape [tokens, K], dtype of y0.
        - **a** (Tensor) - Shape [r, K], dtype of y0; r is 1 to 256, any on the composed path.
        - **b** (Tensor) - Shape [N, r], dtype of y0.
        - **scale** (Tensor) - One number, float32.

    Outputs:
        Tensor [tokens, N] of the dtype of y0.

    Raises:
        BackendError: MINDLORA_BACKEND names a path that is not available, or a dtype is not supported.
        RuntimeError: A shape or rank is wrong (raised by MindSpore or by the kernel, which names it).

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    op = "lora_delta"
    inputs = 5

    def __init__(self):
        super().__init__()
        self.products = Products()

    def construct(self, y0: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, _NAMES, (y0.dtype, x.dtype, a.dtype, b.dtype))
        if self.path != "composed":
            return self.kernel(y0, x, a, b, scale)
        low = self.products.scaled(self.products.times_transposed(x, a), scale)
        return self.products.sum_as(y0, self.products.times_transposed(low, b))

    def bprop(
        self, y0: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, out: Tensor, dout: Tensor
    ) -> Tuple[Tensor, ...]:
        dx, da, db, dscale = self.products.low_rank_grad(dout, x, a, b, scale)
        return dout, dx, da, db, dscale


@constexpr
def _cell():
    return current_cell(LoraDelta)


def lora_delta(y0: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Union[float, Tensor]) -> Tensor:
    r"""Returns the result of LoraDelta, y = y0 + ((x A^T) * scale) B^T, in a network or in PyNative.

    A cell that calls it often should hold its own LoraDelta.

    Args:
        y0, x, a, b (Tensor): As the inputs of LoraDelta.
        scale (float or Tensor): One number.
    """
    return _cell()(y0, x, a, b, ops.cast(scale, mstype.float32))
