"""nf4_linear: a frozen linear layer whose weight is 4-bit NormalFloat, decoded where it is multiplied."""

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops import functional
from mindspore.ops.primitive import constexpr

from mindlora.errors import BackendError
from mindlora.numerics.nf4 import BLOCK, BYTE_VALUES, GROUP
from mindlora.ops.backend import CpuKernel, check_dtypes, choose, current_cell, make_kernel
from mindlora.ops.products import Products


class Nf4Linear(nn.Cell):
    r"""y = x W^T with W = absmax' * TABLE[codes], and dx = dy W. W is frozen: its tensors get zero gradients.

    absmax' = offset + scale * absmax, with the offset and scale of the block's group. mindlora.numerics.nf4.quantize makes
    the four tensors. blocks = ceil(K / 64), groups = ceil(N * blocks / 256).

    The cpu path never holds W: some 0.3 MB of it at a time and thread. The ascend path holds it during a product, in
    the dtype of x: Ascend C decodes, MindSpore's MatMul multiplies, and the backward decodes again. The composed path
    holds it whole during a call, in float32 on a CPU, and indices and halves beside it: about 13 bytes per number.

    Inputs:
        - **x** (Tensor) - Shape [tokens, K]; float32, float16 or bfloat16. All sums are in float32 on a CPU.
        - **codes** (Tensor) - Shape [N, blocks * 32], uint8.
        - **absmax** (Tensor) - Shape [N, blocks], uint8.
        - **scales** (Tensor) - Shape [groups], float32.
        - **offsets** (Tensor) - Shape [groups], float32.

    Outputs:
        Tensor [tokens, N] of the dtype of x.

    Attributes:
        choice (Choice): The path that was picked when the cell was made.

    Raises:
        BackendError: The path that MINDLORA_BACKEND asks for cannot be had, or a dtype is not supported.
        RuntimeError: A shape does not fit (raised by MindSpore or by the kernel, which names it).

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    inputs = 5

    def __init__(self):
        super().__init__()
        self.choice = choose("nf4_linear")
        self.path = self.choice.path
        self.products = Products()
        self.kernel = make_kernel(self.path, "nf4_linear", self.inputs)
        if self.path == "cpu":
            self.grad_kernel, self.grad_like_kernel = CpuKernel("Nf4LinearGrad", 5), CpuKernel("Nf4LinearGradLike", 6)
        # The primitives themselves: their functions cannot be called in a backward in graph mode.
        self.gather, self.concat, self.tile, self.depend = ops.Gather(), ops.Concat(2), ops.Tile(), ops.Depend()
        self.vector = Tensor([0], mstype.float32)
        self.low_values, self.high_values = map(Tensor, BYTE_VALUES)

    def construct(self, x, codes, absmax, scales, offsets):
        check_dtypes("nf4_linear", self.path, ("x",), (x.dtype,))
        check_weight_dtypes("nf4_linear", self.path, codes.dtype, absmax.dtype, scales.dtype, offsets.dtype)
        if self.path == "cpu":
            return self.kernel(x, codes, absmax, scales, offsets)
        return ops.cast(self.composed(x, codes, absmax, scales, offsets), x.dtype)

    def composed(self, x, codes, absmax, scales, offsets):
        """The equation as decoding and a product, in the dtype in which products are computed."""
        wide = self.products.wide(x)
        return self.products.times_transposed(wide, self.weight(wide, x, codes, absmax, scales, offsets))

    def weight(self, like, after, codes, absmax, scales, offsets):
        """W in the dtype of ``like``, with as many columns, decoded once ``after`` is there.

        Else the compiler would be free to decode the weights of all layers first, or to keep W for the backward.
        """
        codes = self.depend(codes, after)
        if self.path == "ascend":
            # Of a vector the kernel takes the dtype alone: x need not be kept for it.
            like = ops.cast(self.vector, like.dtype) if self.has_whole_blocks(like, absmax) else like
            return self.kernel(like, codes, absmax, scales, offsets)
        at, halves = ops.cast(codes, mstype.int32), (-1, absmax.shape[1], codes.shape[1] // absmax.shape[1])
        low, high = self.gather(self.low_values, at, 0), self.gather(self.high_values, at, 0)
        values = self.concat((ops.reshape(low, halves), ops.reshape(high, halves)))
        block = ops.reshape(ops.cast(absmax, mstype.float32), (-1,))
        block = self.of_blocks(offsets, absmax) + self.of_blocks(scales, absmax) * block
        values = values * ops.reshape(block, (-1, absmax.shape[1], 1))
        values = ops.cast(ops.reshape(values, (codes.shape[0], -1)), like.dtype)
        return values if self.has_whole_blocks(like, absmax) else values[:, : like.shape[1]]

    def has_whole_blocks(self, x, absmax):
        """Whether K is known to be a multiple of 64."""
        return functional.isconstant(x.shape[1]) and x.shape[1] == BLOCK * absmax.shape[1]

    def of_blocks(self, of_groups, absmax):
        """For each block what its group has."""
        repeated = ops.reshape(self.tile(ops.reshape(of_groups, (-1, 1)), (1, GROUP)), (-1,))
        return repeated[: absmax.shape[0] * absmax.shape[1]]

    def grad(self, dout, x, codes, absmax, scales, offsets):
        """The gradients for all inputs. Only where K is no multiple of 64, or not known, x is kept for them."""
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

    def bprop(self, x, codes, absmax, scales, offsets, out, dout):
        return self.grad(dout, x, codes, absmax, scales, offsets)


class Nf4LinearWithBias(Nf4Linear):
    r"""y = x W^T + bias: Nf4Linear with one input more and its gradient.

    Inputs:
        - **x**, **codes**, **absmax**, **scales**, **offsets** - As in Nf4Linear.
        - **bias** (Tensor) - Shape [N], dtype of x.

    Outputs:
        Tensor [tokens, N] of the dtype of x.
    """

    inputs = 6

    def construct(self, x, codes, absmax, scales, offsets, bias):
        check_dtypes("nf4_linear", self.path, ("x", "bias"), (x.dtype, bias.dtype))
        check_weight_dtypes("nf4_linear", self.path, codes.dtype, absmax.dtype, scales.dtype, offsets.dtype)
        if self.path == "cpu":
            return self.kernel(x, codes, absmax, scales, offsets, bias)
        return ops.cast(self.composed(x, codes, absmax, scales, offsets) + self.products.wide(bias), x.dtype)

    def bprop(self, x, codes, absmax, scales, offsets, bias, out, dout):
        dbias = ops.cast(self.products.wide(dout).sum(axis=0), bias.dtype)
        return self.grad(dout, x, codes, absmax, scales, offsets) + (dbias,)


@constexpr
def check_weight_dtypes(op, path, codes, absmax, scales, offsets):
    """Raises BackendError unless the tensors of a weight have the dtypes of quantize."""
    for name, dtype, wanted in (
        ("codes", codes, mstype.uint8),
        ("absmax", absmax, mstype.uint8),
        ("scales", scales, mstype.float32),
        ("offsets", offsets, mstype.float32),
    ):
        if dtype != wanted:
            raise BackendError(f"{op} ({path}): {name} is {dtype}: it must be {wanted}, as quantize makes it.")


@constexpr
def _cell(has_bias):
    return current_cell(Nf4LinearWithBias if has_bias else Nf4Linear, "nf4_linear")


def nf4_linear(x, codes, absmax, scales, offsets, bias=None):
    r"""y = x W^T (+ bias) with W = absmax' * TABLE[codes], in 4-bit NormalFloat; see Nf4Linear.

    Args:
        x (Tensor): Shape [tokens, K]; float32, float16 or bfloat16.
        codes (Tensor): Shape [N, blocks * 32], uint8, blocks = ceil(K / 64).
        absmax (Tensor): Shape [N, blocks], uint8.
        scales (Tensor): Shape [groups], float32, groups = ceil(N * blocks / 256).
        offsets (Tensor): Shape [groups], float32.
        bias (Tensor): Shape [N], dtype of x. Default: None.

    Returns:
        Tensor [tokens, N] of the dtype of x.

    Raises:
        BackendError: The path that MINDLORA_BACKEND asks for cannot be had, or a dtype is not supported.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """
    if bias is None:
        return _cell(False)(x, codes, absmax, scales, offsets)
    return _cell(True)(x, codes, absmax, scales, offsets, bias)
