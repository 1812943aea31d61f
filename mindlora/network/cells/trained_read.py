"""TrainedRead: reads a parameter that trains, so that a step on a CPU does not keep what is computed from it."""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype


class TrainedRead(nn.Cell):
    """A parameter that trains, in the dtype of the products: in a compiled step on a CPU, a copy of it.

    MindSpore reads a parameter without a copy, and lets nothing write to it before all operators that read it are done.
    It does so by making their outputs inputs of the write. A train step writes in a branch, which it takes if no
    gradient has overflowed, and what goes into a branch is kept until there: all products with A and B, the cell's
    update [tokens, out] among them, stayed in memory to the end of the backward. With a copy, the copy stays.

    It holds no parameter. The cell calls ``of``, not construct, so that PyNative does not pay for another cell.
    """

    def __init__(self):
        super().__init__()
        self.copies = ms.get_context("device_target") == "CPU" and ms.get_context("mode") == ms.GRAPH_MODE
        self.cast = ops.Cast()
        self.copy = ops.Identity()

    def of(self, parameter: Parameter, dtype: mstype.Type) -> Tensor:
        """The value of a parameter in ``dtype``; a cast to another dtype is a copy already."""
        value = self.cast(parameter, dtype)
        return self.copy(value) if self.copies and self.training and parameter.dtype == dtype else value
