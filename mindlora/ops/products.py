"""The matrix products that the composed path and the gradients are made of, in dtypes that the device has."""

import mindspore as ms
from mindspore import nn, ops
from mindspore.common import dtype as mstype


class Products(nn.Cell):
    """Products of 2-D tensors. On a CPU results are float32, whatever goes in: it has no bfloat16 MatMul or Mul."""

    def __init__(self):
        super().__init__()
        self.widen = ms.get_context("device_target") == "CPU"
        self.nn, self.nt = ops.MatMul(), ops.MatMul(transpose_b=True)
        self.tn = ops.MatMul(transpose_a=True)

    def wide(self, x):
        """x in the dtype in which products are computed."""
        return ops.cast(x, mstype.float32) if self.widen else x

    def times(self, x, y):
        """x y."""
        return self.nn(self.wide(x), self.wide(y))

    def times_transposed(self, x, y):
        """x y^T."""
        return self.nt(self.wide(x), self.wide(y))

    def transposed_times(self, x, y):
        """x^T y."""
        return self.tn(self.wide(x), self.wide(y))

    def scaled(self, x, scale):
        """x * scale, for a scale of one number."""
        return x * ops.reshape(ops.cast(scale, x.dtype), ())

    def sum_as(self, x, y):
        """x + y in the dtype of x."""
        return ops.cast(self.wide(x) + y, x.dtype)

    def low_rank_grad(self, dy, x, a, b, scale):
        """The gradients of sum(dy * (((x A^T) * scale) B^T)) with respect to x, A, B and scale, in their dtypes."""
        low, d_low = self.times_transposed(x, a), self.times(dy, b)
        d_scaled = self.scaled(d_low, scale)
        dx, da = self.times(d_scaled, a), self.transposed_times(d_scaled, x)
        db = self.transposed_times(dy, self.scaled(low, scale))
        dscale = ops.reshape(ops.cast(low * d_low, mstype.float32).sum(), scale.shape)
        return ops.cast(dx, x.dtype), ops.cast(da, a.dtype), ops.cast(db, b.dtype), dscale
