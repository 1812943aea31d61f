"""nf4_linear: a frozen linear layer whose weight is 4-bit NormalFloat, decoded inside the product."""

from typing import Optional, Tuple

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.ops import functional
from mindspore.ops.primitive import constexpr

from mindlora.core.numerics.nf4 import BLOCK, BYTE_VALUES, GROUP, group_size
from mindlora.ops.operator_cell import CpuKernel, OperatorCell, Products, check_dtypes, check_fixed_dtypes, current_cell

_group_size = constexpr(group_size)
# The four tensors of a weight from mindlora.core.numerics.nf4.quantize.
WEIGHT_NAMES = ("codes", "absmax", "scales", "offsets")
WEIGHT_DTYPES = (mstype.uint8, mstype.uint8, mstype.float32, mstype.float32)


class Nf4Linear(OperatorCell):
    r"""y = x W^T with W = absmax' * TABLE[codes], and dx = dy W. W is frozen: its tensors get zero gradients.

    absmax' = offset + scale * absmax, with the offset and scale of the block's group. blocks = ceil(K / 64), groups =
    ceil(N * blocks / 256). mindlora.core.numerics.nf4.quantize returns the four tensors. On a CPU, groups may have 1,
    2, 4 to 256 blocks (mindlora.core.numerics.nf4.by_row), determined by the number of groups.

    The cpu path never holds W whole: about 0.3 MB at a time in each thread. The ascend path holds it during a
    product, in the dtype of x: Ascend C decodes, MindSpore's MatMul multiplies, and the backward decodes again. The
    composed path holds it whole during a call, in float32 on a CPU, together with indices and intermediate results:
    about 13 bytes per weight.

    Inputs:
        - **x** (Tensor) - Shape [tokens, K]; float32, float16 or bfloat16. All sums are in float32 on a CPU.
        - **codes** (Tensor) - Shape [N, blocks * 32], uint8.
        - **absmax** (Tensor) - Shape [N, blocks], uint8.
        - **scales** (Tensor) - Shape [groups], float32.
        - **offsets** (Tensor) - Shape [groups], float32.

    Outputs:
        Tensor [tokens, N] of the dtype of x.

    Raises:
        BackendError: MINDLORA_BACKEND names a path that is not available, or a dtype is not supported.
        RuntimeError: A shape is wrong (raised by MindSpore or by the kernel, which names it).

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    op = "nf4_linear"
    inputs = 5

    def __init__(self):
        super().__init__()
        self.products = Products()
        if self.path == "cpu":
            self.grad_kernel = CpuKernel("Nf4LinearGrad", 5)
            self.grad_like_kernel = CpuKernel("Nf4LinearGradLike", 6)
            self.norms_kernel = CpuKernel("Nf4SquaredNorms", 5)
        # Primitives, because their functional forms cannot be called in a backward in graph mode.
        self.gather = ops.Gather()
        self.concat = ops.Concat(2)
        self.tile = ops.Tile()
        self.depend = ops.Depend()
        self.vector = Tensor([0], mstype.float32)
        self.low_values, self.high_values = map(Tensor, BYTE_VALUES)
        self.squares = Tensor((BYTE_VALUES**2).sum(0))
        self.sum = ops.ReduceSum()

    def construct(self, x: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("x",), (x.dtype,))
        dtypes = codes.dtype, absmax.dtype, scales.dtype, offsets.dtype
        check_fixed_dtypes(self.op, self.path, WEIGHT_NAMES, dtypes, WEIGHT_DTYPES)
        if self.path == "cpu":
            return self.kernel(x, codes, absmax, scales, offsets)
        return ops.cast(self.composed(x, codes, absmax, scales, offsets), x.dtype)

    def composed(self, x: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        """The equation as a decoding and a product, in the products' dtype."""
        wide = self.products.wide(x)
        return self.products.times_transposed(wide, self.weight(wide, x, codes, absmax, scales, offsets))

    def weight(
        self, like: Tensor, after: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor
    ) -> Tensor:
        """W [N, K] in the dtype of ``like``, [_, K], decoded only once ``after`` is computed.

        Otherwise the compiler could decode the weights of all layers first, or keep W for the backward.
        """
        codes = self.depend(codes, after)
        if self.path == "ascend":
            # The kernel reads only the dtype of a vector, so that x need not be kept for it.
            like = ops.cast(self.vector, like.dtype) if self.has_whole_blocks(like, absmax) else like
            return self.kernel(like, codes, absmax, scales, offsets)
        at = ops.cast(codes, mstype.int32)
        halves = (-1, absmax.shape[1], codes.shape[1] // absmax.shape[1])
        low, high = self.gather(self.low_values, at, 0), self.gather(self.high_values, at, 0)
        values = self.concat((ops.reshape(low, halves), ops.reshape(high, halves)))
        values = values * ops.reshape(self.largest(absmax, scales, offsets), (-1, absmax.shape[1], 1))
        values = ops.cast(ops.reshape(values, (codes.shape[0], -1)), like.dtype)
        return values if self.has_whole_blocks(like, absmax) else values[:, : like.shape[1]]

    def has_whole_blocks(self, x: Tensor, absmax: Tensor) -> bool:
        """Whether K is known to be a multiple of 64 when the graph is compiled."""
        return functional.isconstant(x.shape[1]) and x.shape[1] == BLOCK * absmax.shape[1]

    def squared_norms(self, after: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        """||W||^2 of each row, float32 [N].

        The cpu path adds them up as it decodes W. Elsewhere a table has the sum of squares for each byte of codes. That
        takes about 4 bytes per weight during the call, which begins only once ``after``, of any shape, is computed.
        """
        if self.path == "cpu":
            return self.norms_kernel(self.vector, codes, absmax, scales, offsets)
        at = ops.cast(self.depend(codes, after), mstype.int32)
        blocks = (-1, absmax.shape[1], codes.shape[1] // absmax.shape[1])
        squares = self.sum(ops.reshape(self.gather(self.squares, at, 0), blocks), 2)
        largest = ops.reshape(self.largest(absmax, scales, offsets), (-1, absmax.shape[1]))
        return self.sum(squares * (largest * largest), 1)

    def largest(self, absmax: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        """absmax' = offset + scale * absmax, float32 [N * blocks]."""
        block = ops.reshape(ops.cast(absmax, mstype.float32), (-1,))
        return self.of_blocks(offsets, absmax) + self.of_blocks(scales, absmax) * block

    def of_blocks(self, of_groups: Tensor, absmax: Tensor) -> Tensor:
        """For each block, the value of its group."""
        blocks = absmax.shape[0] * absmax.shape[1]
        size = GROUP
        # As for a network's parameters.
        if functional.isconstant(absmax.shape[0]) and functional.isconstant(of_groups.shape[0]):
            size = _group_size(blocks, of_groups.shape[0])
        repeated = ops.reshape(self.tile(ops.reshape(of_groups, (-1, 1)), (1, size)), (-1,))
        return repeated[:blocks]

    def grad(
        self, dout: Tensor, x: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor
    ) -> Tuple[Tensor, ...]:
        """The gradients for all inputs. x is kept for them only where K is not known to be a multiple of 64."""
        if self.path == "cpu" and self.has_whole_blocks(x, absmax):
            dx = self.grad_kernel(dout, codes, absmax, scales, offsets)
        elif self.path == "cpu":
            dx = self.grad_like_kernel(dout, codes, absmax, scales, offsets, x)
        else:
            dx = self.products.times(dout, self.weight(self.products.wide(x), dout, codes, absmax, scales, offsets))
        return (
            ops.cast(dx, x.dtype),
            ops.zeros_like(codes),
            ops.zeros_like(absmax),
            ops.zeros_like(scales),
            ops.zeros_like(offsets),
        )

    def bprop(
        self, x: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor, out: Tensor, dout: Tensor
    ) -> Tuple[Tensor, ...]:
        return self.grad(dout, x, codes, absmax, scales, offsets)


class Nf4LinearWithBias(Nf4Linear):
    r"""y = x W^T + bias: Nf4Linear with one more input and its gradient.

    Inputs:
        - **x**, **codes**, **absmax**, **scales**, **offsets** - As in Nf4Linear.
        - **bias** (Tensor) - Shape [N], dtype of x.

    Outputs:
        Tensor [tokens, N] of the dtype of x.
    """

    inputs = 6

    def construct(
        self, x: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor, bias: Tensor
    ) -> Tensor:
        check_dtypes(self.op, self.path, ("x", "bias"), (x.dtype, bias.dtype))
        dtypes = codes.dtype, absmax.dtype, scales.dtype, offsets.dtype
        check_fixed_dtypes(self.op, self.path, WEIGHT_NAMES, dtypes, WEIGHT_DTYPES)
        if self.path == "cpu":
            return self.kernel(x, codes, absmax, scales, offsets, bias)
        return ops.cast(self.composed(x, codes, absmax, scales, offsets) + self.products.wide(bias), x.dtype)

    def bprop(
        self,
        x: Tensor,
        codes: Tensor,
        absmax: Tensor,
        scales: Tensor,
        offsets: Tensor,
        bias: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tuple[Tensor, ...]:
        return self.grad(dout, x, codes, absmax, scales, offsets) + (self.products.bias_grad(dout, bias),)


@constexpr
def _cell(has_bias):
    return current_cell(Nf4LinearWithBias if has_bias else Nf4Linear)


def nf4_linear(
    x: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor, bias: Optional[Tensor] = None
) -> Tensor:
    r"""Returns the result of Nf4Linear, y = x W^T (+ bias) with W = absmax' * TABLE[codes].

    Args:
        x, codes, absmax, scales, offsets (Tensor): As the inputs of Nf4Linear.
        bias (Tensor): Shape [N], dtype of x. Default: None.
    """
    if bias is None:
        return _cell(False)(x, codes, absmax, scales, offsets)
    return _cell(True)(x, codes, absmax, scales, offsets, bias)
