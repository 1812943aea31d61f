"""integer_linear: a frozen linear layer whose weight is in integers of 4 or 8 bits, decoded where it is multiplied."""

from typing import Any, Callable, Tuple

import numpy as np
from mindspore import Tensor, ops
from mindspore.common import dtype as mstype

from mindlora.core.numerics.integers import HALF, unpack
from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_dtypes, check_fixed_dtypes


class IntegerLinear(OperatorCell):
    r"""y = x W^T with W = (codes - zeros) * scales of each group of columns, and dx = dy W. W gets no gradient.

    mindlora.core.numerics.integers makes the three tensors. W is never held whole: about 0.3 MB of it at a time in each
    thread. For a CPU.

    Args:
        bits (int): Of a code, 4 or 8.

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

    Source: Frantar et al., GPTQ, 2023; Dettmers et al., LLM.int8(), 2022: the weights that are published so.
    """

    op = "integer_linear"
    inputs = 4

    def __init__(self, bits: int):
        super().__init__()
        self.bits = bits
        grad_kernel = CpuKernel(f"Int{bits}LinearGrad", self.inputs)
        self.kernel = CpuKernel(f"Int{bits}Linear", self.inputs, bprop=_gradient(grad_kernel))

        # The numbers in each of the 256 bytes, one or two, and their squares; and the number that a byte is as a zero.
        bytes_ = np.arange(256, dtype=np.uint8)
        numbers = unpack(np.repeat(bytes_[:, None], HALF, axis=1), bits).reshape(256, -1, HALF)[:, :, 0]
        self.numbers = tuple(Tensor(half) for half in numbers.T.astype(np.int32))
        self.squares = tuple(Tensor(half**2) for half in numbers.T.astype(np.int32))
        self.zeros = Tensor((bytes_.view(np.int8) if bits == 8 else bytes_).astype(np.int32))
        self.gather, self.sum, self.stack, self.depend = ops.Gather(), ops.ReduceSum(), ops.Stack(2), ops.Depend()

    def construct(self, x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("x",), (x.dtype,))
        check_dtypes(self.op, self.path, ("scales",), (scales.dtype,))
        dtypes = codes.dtype, zeros.dtype
        check_fixed_dtypes(self.op, self.path, ("codes", "zeros"), dtypes, (mstype.uint8, mstype.uint8))
        return self.kernel(x, codes, zeros, scales)

    def squared_norms(self, after: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        """||W||^2 of each row, float32 [N], read only once ``after`` is computed.

        The sum of (code - zero)^2 of each group is exact, from tables of 256 bytes, so W is not decoded: this takes
        about 8 bytes for each byte of codes during the call.
        """
        at = ops.cast(self.depend(codes, after), mstype.int32)
        columns = codes.shape[1] * 8 // self.bits // zeros.shape[1]
        zero = self.gather(self.zeros, ops.cast(zeros, mstype.int32), 0)
        first, second = self._of_groups(self.numbers, at, zeros), self._of_groups(self.squares, at, zeros)
        squares = second - 2 * zero * first + columns * zero * zero
        scales = ops.cast(scales, mstype.float32)
        return self.sum(ops.cast(squares, mstype.float32) * (scales * scales), 1)

    def _of_groups(self, tables, at, zeros):
        """Sums over the columns of each group, int32 [N, groups], of what ``tables`` have for a byte's numbers."""
        halves = ()
        for table in tables:
            halves += (self.sum(ops.reshape(self.gather(table, at, 0), (at.shape[0], -1, HALF)), 2),)
        # In the order of the columns: a block has one half after the other.
        return self.sum(ops.reshape(self.stack(halves), (at.shape[0], zeros.shape[1], -1)), 2)


def _gradient(kernel: CpuKernel) -> Callable[..., Tuple[Any, ...]]:
    """Returns the bprop of a product, whose gradient ``kernel`` computes; the primitive's, as in FrozenLinear."""

    def bprop(x, codes, zeros, scales, out, dout):
        dx = kernel(dout, codes, zeros, scales)
        return dx, ops.zeros_like(codes), ops.zeros_like(zeros), ops.zeros_like(scales)

    return bprop
