"""CellWithBprop: a cell that brings its gradient, in graph mode and in PyNative."""

from typing import Any, Optional, Tuple

from mindspore import Tensor, nn
from mindspore.common import _Function


class CellWithBprop(nn.Cell):
    """Base of the cells that have a bprop. It gets the inputs of construct, its output, and the output's gradient.

    In PyNative, MindSpore itself calls the bprop only below a function that it differentiates (value_and_grad and the
    like), and Tensor.backward() raises an error. Here both call it. They give it None as the output, which no bprop
    reads, and which therefore need not be kept.
    """

    def _call_custom_bprop(self, *inputs: Tensor) -> Tensor:
        # MindSpore calls it in place of construct where PyNative records for a backward.
        return _Recorded.apply(self, *inputs)


class _Recorded(_Function):
    """The forward of a CellWithBprop in PyNative, and its bprop as the backward."""

    @staticmethod
    def forward(ctx: Any, cell: CellWithBprop, *inputs: Tensor) -> Tensor:
        ctx.cell = cell
        ctx.save_for_backward(*inputs)
        return cell.construct(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tuple[Optional[Tensor], ...]:
        return None, *ctx.cell.bprop(*ctx.saved_tensors, None, dout)
