"""Operators that broadcast or transpose without the tables that MindSpore's CPU kernels keep for them.

MindSpore's elementwise kernels for a CPU keep two tables of 8 bytes for each element of an output to which an input was
broadcast, and a transposition one, as long as the compiled graph lives: at 22 layers and 256 tokens more than the
activations. BroadcastTo, Gather and operators on equal shapes keep none.

Use these cells in graph mode alone: PyNative keeps no tables, and Tensor.backward() does not call their bprop.
"""

from typing import Tuple

from mindspore import Tensor, nn, ops


class BroadcastMul(nn.Cell):
    """y = x * b, where ``b`` is broadcast to the shape of x.

    Inputs:
        - **x** (Tensor) - Any shape.
        - **b** (Tensor) - A shape that broadcasts to that of x, and the same dtype.

    Outputs:
        Tensor of the shape and dtype of x. The backward keeps x and b, and no b of the shape of x.
    """

    def construct(self, x: Tensor, b: Tensor) -> Tensor:
        return x * _broadcast(b, x)

    def bprop(self, x: Tensor, b: Tensor, out: Tensor, dout: Tensor) -> Tuple[Tensor, Tensor]:
        return dout * _broadcast(b, dout), _sum_to(dout * x, b.shape)


class BroadcastAdd(nn.Cell):
    """y = b + x, with inputs ``b`` and ``x``, where b is broadcast to the shape of x."""

    def construct(self, b: Tensor, x: Tensor) -> Tensor:
        return ops.broadcast_to(b, x.shape) + x


class BroadcastSub(nn.Cell):
    """y = x - b, with inputs ``x`` and ``b``, where b is broadcast to the shape of x."""

    def construct(self, x: Tensor, b: Tensor) -> Tensor:
        return x - ops.broadcast_to(b, x.shape)


class Softmax(nn.Cell):
    """y = softmax(x) over the last axis, with the gradient dx = y * dy - y * sum(y * dy)."""

    def __init__(self):
        super().__init__()
        self.softmax = ops.Softmax()
        self.sum = ops.ReduceSum(keep_dims=True)

    def construct(self, x: Tensor) -> Tensor:
        return self.softmax(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Tuple[Tensor]:
        product = out * dout
        return (product - out * ops.broadcast_to(self.sum(product, -1), product.shape),)


class SwapHeads(nn.Cell):
    """Exchanges the two axes in the middle, [B, N, M, D] to [B, M, N, D], by gathering rows of D numbers.

    Inputs:
        - **x** (Tensor) - Shape [B, N, M, D].
        - **axes** (tuple of int) - (0, 2, 1, 3), as MindFormers gives them to Transpose.

    Outputs:
        Tensor [B, M, N, D] of the dtype of x.
    """

    def __init__(self):
        super().__init__()
        self.gather = ops.Gather()
        self.transpose = ops.Transpose()

    def construct(self, x: Tensor, axes: Tuple[int, ...]) -> Tensor:
        return self._swapped(x)

    def bprop(self, x: Tensor, axes: Tuple[int, ...], out: Tensor, dout: Tensor) -> Tuple[Tensor, Tuple[int, ...]]:
        return self._swapped(dout), axes

    def _swapped(self, x):
        batch, first, second, width = x.shape
        # This transposition has a table too, with one entry per row, which all layers share.
        rows = ops.range(0, batch * first * second, 1).reshape((batch, first, second))
        rows = self.transpose(rows, (0, 2, 1)).reshape((-1,))
        return self.gather(x.reshape((-1, width)), rows, 0).reshape((batch, second, first, width))


def _broadcast(b, x):
    """Returns b in the shape of x, computed after x: otherwise MindSpore computes all layers' when a step begins."""
    return ops.broadcast_to(ops.depend(b, x), x.shape)


def _sum_to(x, shape):
    """Returns x, summed over the axes along which ``shape`` was broadcast to its shape."""
    added = x.ndim - len(shape)
    axes = ()
    for axis in range(x.ndim):
        if axis < added or shape[axis - added] == 1:
            axes += (axis,)
    return x.sum(axes).reshape(shape) if axes else x
