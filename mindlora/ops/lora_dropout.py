"""lora_dropout: dropout by a hash of a seed, alone and before lora_delta. The seed is kept instead of the mask."""

from typing import Tuple

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.ops.operator_cell import (
    CellWithBprop,
    OperatorCell,
    Products,
    check_dtypes,
    check_fixed_dtypes,
    current_cell,
)

# As int32, which wraps like uint32.
_ROW, _COLUMN, _FIRST, _SECOND = (
    value - 2**32 if value >= 2**31 else value for value in (0x9E3779B1, 0x85EBCA77, 0x7FEB352D, 0x846CA68B)
)


class LoraDropout(OperatorCell):
    r"""y[t, k] = x[t, k] / (1 - rate) where a hash of (seed, t, k) keeps the element, else 0.

    The backward hashes again: dx = dropout(dy) with the same seed and rate.

    Inputs:
        - **x** (Tensor) - Shape [tokens, K]; float32, float16 or bfloat16.
        - **seed** (Tensor) - Shape [1], int32.
        - **rate** (Tensor) - Shape [1], float32, in [0, 1).

    Outputs:
        Tensor [tokens, K] of the dtype of x.

    Raises:
        BackendError: MINDLORA_BACKEND asks for a path that is not available, or a dtype is not supported.
        RuntimeError: rate is out of range (raised by the kernel; the composed path cannot raise).

    Source: Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014.
    """

    op = "lora_dropout"
    inputs = 3

    def __init__(self):
        super().__init__()
        # Primitives only: a function that the forward calls cannot be compiled again for the backward.
        self.exclusive_or = ops.BitwiseXor()
        self.both = ops.BitwiseAnd()
        self.shift = ops.RightShift()
        self.range = ops.Range()
        self.select = ops.Select()
        self.zeros = ops.ZerosLike()
        self.by_15 = Tensor(15, ms.int32)
        self.by_16 = Tensor(16, ms.int32)
        self.low_16, self.low_17, self.low_31 = (Tensor(2**bits - 1, ms.int32) for bits in (16, 17, 31))

    def construct(self, x: Tensor, seed: Tensor, rate: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("x",), (x.dtype,))
        check_fixed_dtypes(self.op, self.path, ("seed", "rate"), (seed.dtype, rate.dtype), (ms.int32, ms.float32))
        if self.path != "composed":
            return self.kernel(x, seed, rate)
        row = ops.expand_dims(ops.cast(self.range(0, x.shape[0], 1), mstype.int32), 1)
        column = ops.expand_dims(ops.cast(self.range(0, x.shape[1], 1), mstype.int32), 0)
        h = self.mixed(self.mixed(row * _ROW + seed) + column * _COLUMN)
        kept = self.both(h, self.low_31) >= ops.cast(rate * 2147483648.0, mstype.int32)
        wide = ops.cast(x, mstype.float32)
        return ops.cast(self.select(kept, wide * (1 / (1 - rate)), self.zeros(wide)), x.dtype)

    def mixed(self, h: Tensor) -> Tensor:
        """A bijection of int32 in which every bit of the result depends on every bit of h."""
        # The masks clear the copies of the sign bit that a shift to the right brings in.
        h = self.exclusive_or(h, self.both(self.shift(h, self.by_16), self.low_16)) * _FIRST
        h = self.exclusive_or(h, self.both(self.shift(h, self.by_15), self.low_17)) * _SECOND
        return self.exclusive_or(h, self.both(self.shift(h, self.by_16), self.low_16))

    def bprop(self, x: Tensor, seed: Tensor, rate: Tensor, out: Tensor, dout: Tensor) -> Tuple[Tensor, ...]:
        return self.construct(dout, seed, rate), ops.zeros_like(seed), ops.zeros_like(rate)


class LoraDeltaWithDropout(CellWithBprop):
    r"""y = y0 + ((dropout(x) A^T) * scale) B^T, with gradients for y0, x, A, B and scale.

    Only the seed is kept for the backward, not the mask or the dropped x. The gradients are LoraDelta's, with
    dropout(x) for x in dA and dB, and dx = dropout(D A).

    Inputs:
        - **y0**, **x**, **a**, **b**, **scale** - As in LoraDelta; any rank.
        - **seed**, **rate** - As in LoraDropout.

    Outputs:
        Tensor [tokens, N] of the dtype of y0.

    Raises:
        BackendError: As in LoraDropout.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021; Srivastava et al., 2014.
    """

    def __init__(self):
        super().__init__()
        self.dropout = LoraDropout()
        self.products = Products()
        self.depend = ops.Depend()

    def construct(
        self, y0: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, seed: Tensor, rate: Tensor
    ) -> Tensor:
        check_dtypes(
            "lora_delta with dropout", self.dropout.path, ("y0", "x", "A", "B"), (y0.dtype, x.dtype, a.dtype, b.dtype)
        )
        low = self.products.times_transposed(self.dropout(x, seed, rate), a)
        return self.products.sum_as(y0, self.products.times_transposed(self.products.scaled(low, scale), b))

    def bprop(
        self,
        y0: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        scale: Tensor,
        seed: Tensor,
        rate: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tuple[Tensor, ...]:
        # Without this, the compiler would reuse the dropped x of the forward, and keep it in memory until now.
        seed = self.depend(seed, dout)
        dropped = self.dropout.construct(x, seed, rate)
        d_dropped, da, db, dscale = self.products.low_rank_grad(dout, dropped, a, b, scale)
        dx = self.dropout.construct(d_dropped, seed, rate)
        return dout, dx, da, db, dscale, ops.zeros_like(seed), ops.zeros_like(rate)


@constexpr
def _cell():
    return current_cell(LoraDropout)


def lora_dropout(x: Tensor, seed: Tensor, rate: Tensor) -> Tensor:
    r"""Returns the result of LoraDropout, x / (1 - rate) where a hash of (seed, t, k) keeps the element, else 0."""
    return _cell()(x, seed, rate)
