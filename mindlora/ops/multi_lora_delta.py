"""multi_lora_delta: each row of a batch uses an adapter of its own, from one pool."""

from typing import Tuple

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.errors import BackendError
from mindlora.ops.operator_cell import OperatorCell, check_dtypes, check_fixed_dtypes, current_cell

INDEX_NAMES = ("ranks", "scales", "indices")
INDEX_DTYPES = (ms.int32, ms.float32, ms.int32)


class MultiLoraDelta(OperatorCell):
    r"""y[t] = y0[t] + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t]; y[t] = y0[t] where i is negative.

    Row j of a slot of the pool is A_i[j, :] followed by B_i[:, j], so an adapter of rank r is the first r rows of its
    slot; the other rows are never used. Rows of x with the same adapter need not be adjacent: the kernel sorts
    them, so that one operator is both bgmv (an adapter for each row) and sgmv (one for each segment). It is meant for
    serving: it has no gradient, and asking for one is an error.

    Inputs:
        - **y0** (Tensor) - Shape [tokens, N]; float32, float16 or bfloat16. All sums are in float32 on a CPU.
        - **x** (Tensor) - Shape [..., K], dtype of y0; all axes but the last are tokens.
        - **pool** (Tensor) - Shape [slots, max_rank, K + N], dtype of y0; on the cpu path max_rank is 1 to 256.
        - **ranks** (Tensor) - Shape [slots], int32: the rank of each adapter; 0 for an empty slot, which adds nothing.
        - **scales** (Tensor) - Shape [slots], float32.
        - **indices** (Tensor) - Shape [at least tokens], int32: those after the tokens are not looked at, so that a
          server can keep a Parameter of one size. An index beyond the last slot is an error on the cpu path; on the
          composed one, which cannot raise, its row is NaN.

    Outputs:
        Tensor [..., N] of the dtype of y0, with the axes of x.

    Raises:
        BackendError: MINDLORA_BACKEND asks for a path that is not available, a dtype is not supported, or a gradient
            is asked for.
        RuntimeError: A shape, rank or index is wrong (raised by MindSpore or by the kernel, which names it).

    Source: Chen et al., Punica: Multi-Tenant LoRA Serving, 2023; Sheng et al., S-LoRA: Serving Thousands of Concurrent
    LoRA Adapters, 2023.
    """

    op = "multi_lora_delta"
    inputs = 6

    def __init__(self):
        super().__init__()
        self.widen = ms.get_context("device_target") == "CPU"
        self.batch = ops.BatchMatMul()

    def construct(self, y0: Tensor, x: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("y0", "x", "pool"), (y0.dtype, x.dtype, pool.dtype))
        dtypes = ranks.dtype, scales.dtype, indices.dtype
        check_fixed_dtypes(self.op, self.path, INDEX_NAMES, dtypes, INDEX_DTYPES)
        if self.path == "cpu":
            return self.kernel(y0, x, pool, ranks, scales, indices)
        return self.without_library(y0, x, pool, ranks, scales, indices)

    def without_library(
        self, y0: Tensor, x: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor
    ) -> Tensor:
        """The same on the other paths. On the composed one y0 may have a wider dtype than x, and so has the result."""
        shape = x.shape[:-1] + (y0.shape[-1],)
        x = ops.reshape(self.wide(x), (-1, x.shape[-1]))
        indices = ops.slice(indices, (0,), (x.shape[0],))
        multiply = self.kernel if self.path == "ascend" else self.composed
        return ops.cast(ops.reshape(multiply(y0, x, pool, ranks, scales, indices), shape), y0.dtype)

    def composed(self, y0: Tensor, x: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
        """The equation in plain operators. It copies a whole slot for every row, so it is not meant to be fast."""
        slots, max_rank, _ = pool.shape
        in_channels = x.shape[1]
        slot = ops.clamp(indices, 0, slots - 1)
        # Unused elements are replaced rather than multiplied by zero, which would let NaN through.
        used = ops.expand_dims(ops.arange(0, max_rank, 1, dtype=mstype.int32), 0) < ops.expand_dims(ranks[slot], 1)
        rows = ops.expand_dims(ops.logical_and(used, ops.expand_dims(indices >= 0, 1)), 2)
        blocks = self.wide(pool)[slot]
        blocks = ops.select(ops.broadcast_to(rows, blocks.shape), blocks, ops.zeros_like(blocks))
        # Not blocks[:, :, :in_channels]: slicing a tensor without rows crashes the process on a CPU.
        a = ops.gather(blocks, ops.arange(0, in_channels, 1, dtype=mstype.int32), 2)
        bt = ops.gather(blocks, ops.arange(in_channels, pool.shape[2], 1, dtype=mstype.int32), 2)
        low = self.batch(a, ops.expand_dims(self.wide(x), 2))
        low = low * ops.reshape(ops.cast(scales[slot], low.dtype), (-1, 1, 1))
        delta = ops.squeeze(self.batch(ops.swapaxes(low, 1, 2), bt), 1)
        y0_wide = self.wide(y0)
        y = self.where(indices >= 0, y0_wide + delta, y0_wide)
        return self.where(indices >= slots, ops.full_like(y, float("nan")), y)

    def where(self, rows: Tensor, y: Tensor, otherwise: Tensor) -> Tensor:
        """The rows of y where ``rows`` is True, and those of ``otherwise`` elsewhere."""
        return ops.select(ops.broadcast_to(ops.expand_dims(rows, 1), y.shape), y, otherwise)

    def wide(self, x: Tensor) -> Tensor:
        """x in the dtype in which products are computed."""
        return ops.cast(x, mstype.float32) if self.widen else x

    def bprop(
        self,
        y0: Tensor,
        x: Tensor,
        pool: Tensor,
        ranks: Tensor,
        scales: Tensor,
        indices: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tuple[Tensor, ...]:
        refuse_gradient(self.op)
        return dout, x, pool, ranks, scales, indices


@constexpr
def refuse_gradient(op: str) -> None:
    """Raises BackendError. Runs when the backward of a graph is compiled."""
    raise BackendError(
        f"{op} has no gradient: it serves adapters that are trained already. Train with {op.removeprefix('multi_')}."
    )


@constexpr
def _cell():
    return current_cell(MultiLoraDelta)


def multi_lora_delta(y0: Tensor, x: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
    r"""Returns what MultiLoraDelta does, y[t] = y0[t] + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t].

    Args:
        y0, x, pool, ranks, scales, indices (Tensor): As the inputs of MultiLoraDelta.
    """
    return _cell()(y0, x, pool, ranks, scales, indices)
