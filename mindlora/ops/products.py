"""The matrix products of the composed path and of the gradients, in dtypes that the device supports."""

from typing import Tuple

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype


class Products(nn.Cell):
    """Products of 2-D tensors. On a CPU, results are always float32, because it has no bfloat16 MatMul or Mul."""

    def __init__(self):
        super().__init__()
        self.widen = ms.get_context("device_target") == "CPU"
        self.nn = ops.MatMul()
        self.nt = ops.MatMul(transpose_b=True)
        self.tn = ops.MatMul(transpose_a=True)

    def wide(self, x: Tensor) -> Tensor:
        """x in the dtype in which products are computed."""
        return ops.cast(x, mstype.float32) if self.widen else x

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """x y."""
        return self.nn(self.wide(x), self.wide(y))

    def times_transposed(self, x: Tensor, y: Tensor) -> Tensor:
        """x y^T."""
        return self.nt(self.wide(x), self.wide(y))

    def transposed_times(self, x: Tensor, y: Tensor) -> Tensor:
        """x^T y."""
        return self.tn(self.wide(x), self.wide(y))

    def scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """x * scale, for a scale of one number."""
        return x * ops.reshape(ops.cast(scale, x.dtype), ())

    def sum_as(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y in the dtype of x."""
        return ops.cast(self.wide(x) + y, x.dtype)

    def bias_grad(self, dy: Tensor, bias: Tensor) -> Tensor:
        """The gradient of sum(dy * (y + bias)) with respect to bias [N], in its dtype; dy is [tokens, N]."""
        return ops.cast(self.wide(dy).sum(axis=0), bias.dtype)

    def low_rank_grad(
        self, dy: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of sum(dy * (((x A^T) * scale) B^T)) with respect to x, A, B and scale, in their dtypes.

        dy is [tokens, N], x [tokens, K], a [r, K], b [N, r], and scale one float32 number.
        """
        low = self.times_transposed(x, a)
        d_low = self.times(dy, b)
        d_scaled = self.scaled(d_low, scale)
        dx = self.times(d_scaled, a)
        da = self.transposed_times(d_scaled, x)
        db = self.transposed_times(dy, self.scaled(low, scale))
        dscale = ops.reshape(ops.cast(low * d_low, mstype.float32).sum(), scale.shape)
        return ops.cast(dx, x.dtype), ops.cast(da, a.dtype), ops.cast(db, b.dtype), dscale
