"""multi_lora_delta: each row of a batch uses its own adapter, from one pool."""

from typing import Tuple

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.ops.operator_cell import OperatorCell, Products, check_dtypes, check_fixed_dtypes, current_cell

INDEX_NAMES = ("ranks", "scales", "indices")
INDEX_DTYPES = (ms.int32, ms.float32, ms.int32)


@constexpr
def check_pool(op: str, path: str, name: str, dtype: ms.dtype.Type, pool: ms.dtype.Type, widens: bool) -> None:
    """Raises BackendError for a pool that does not suit the dtype of an input. Runs when a graph is compiled.

    ``widens`` says whether a 16-bit pool is widened to float32 if the input ``name`` is float32.
    """
    if widens and dtype == ms.float32:
        check_dtypes(op, path, ("pool",), (pool,))
    else:
        check_dtypes(op, path, (name, "pool"), (dtype, pool))


class MultiLoraDelta(OperatorCell):
    r"""y[t] = y0[t] + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t]; y[t] = y0[t] where i is negative.

    Row j of a slot of the pool is A_i[j, :] followed by B_i[:, j], so an adapter of rank r is the first r rows of its
    slot; the other rows are never used. Rows of x with the same adapter need not be adjacent: the kernel sorts
    them, so that one operator serves as both bgmv (an adapter for each row) and sgmv (one for each segment).

    Every floating-point input has a gradient. With D[t] = (dy[t] B_i) * scale_i: dy0 = dy, dx[t] = D[t] A_i, and of the
    pool dA_i = sum of D[t]^T x[t] and dB_i = sum of dy[t]^T ((x[t] A_i^T) * scale_i) over rows t with indices[t] = i.
    The backward uses plain MindSpore operators on every path: products of all rows with all adapters, of which the
    matching ones count. If a batch has equal numbers of rows for each adapter, one after another, products that
    are batched over the adapters are faster: StackedLoRADense trains by them.

    Inputs:
        - **y0** (Tensor) - Shape [tokens, N]; float32, float16 or bfloat16. All sums are in float32 on a CPU.
        - **x** (Tensor) - Shape [..., K], dtype of y0; all axes but the last are tokens.
        - **pool** (Tensor) - Shape [slots, max_rank, K + N], dtype of y0; on a CPU, with y0 in float32, any of the
          three: it is widened as it is read. On the cpu path max_rank is 1 to 256.
        - **ranks** (Tensor) - Shape [slots], int32: the rank of each adapter; 0 for an empty slot, which adds nothing.
        - **scales** (Tensor) - Shape [slots], float32.
        - **indices** (Tensor) - Shape [at least tokens], int32: those after the tokens are ignored, so that a
          server can keep a Parameter of a fixed size. An index beyond the last slot is an error on the cpu path; on the
          ascend and composed ones, which cannot raise, its row is NaN.

    Outputs:
        Tensor [..., N] of the dtype of y0, with the axes of x.

    Raises:
        BackendError: MINDLORA_BACKEND asks for a path that is not available, or a dtype is not supported.
        RuntimeError: A shape is wrong, or on the cpu path a rank or an index (raised by MindSpore or by the kernel,
            which names it).

    Source: Chen et al., Punica: Multi-Tenant LoRA Serving, 2023; Sheng et al., S-LoRA: Serving Thousands of Concurrent
    LoRA Adapters, 2023.
    """

    op = "multi_lora_delta"
    inputs = 6

    def __init__(self):
        super().__init__()
        self.widen = ms.get_context("device_target") == "CPU"
        self.batch = ops.BatchMatMul()
        self.products = Products()
        # The backward must not call functions of ops that the forward calls: MindSpore cannot compile such a graph.
        self.zeros_like = ops.ZerosLike()

    def construct(self, y0: Tensor, x: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("y0", "x"), (y0.dtype, x.dtype))
        check_pool(self.op, self.path, "y0", y0.dtype, pool.dtype, self.widen)
        dtypes = ranks.dtype, scales.dtype, indices.dtype
        check_fixed_dtypes(self.op, self.path, INDEX_NAMES, dtypes, INDEX_DTYPES)
        if self.path == "cpu":
            return self.kernel(y0, x, pool, ranks, scales, indices)
        return self.without_library(y0, x, pool, ranks, scales, indices)

    def without_library(
        self, y0: Tensor, x: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor
    ) -> Tensor:
        """Computes the result on the other paths. On the composed one, y0 and the result may be wider than x."""
        shape = x.shape[:-1] + (y0.shape[-1],)
        x = ops.reshape(self.wide(x), (-1, x.shape[-1]))
        # The kernel takes more indices than tokens; otherwise each linear cell of a step would cut them.
        multiply = self.kernel if self.path == "ascend" else self.composed
        return ops.cast(ops.reshape(multiply(y0, x, pool, ranks, scales, indices), shape), y0.dtype)

    def composed(self, y0: Tensor, x: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
        """The equation in plain operators. It copies a whole slot for every row, so it is slow."""
        slots, max_rank, _ = pool.shape
        in_channels = x.shape[1]
        indices = ops.slice(indices, (0,), (x.shape[0],))
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
        """The rows of y where ``rows`` is True, and of ``otherwise`` elsewhere."""
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
        slots, max_rank, width = pool.shape
        in_channels = x.shape[-1]
        rows = ops.reshape(self.wide(x), (-1, in_channels))
        dy = ops.reshape(self.wide(dout), (-1, y0.shape[-1]))
        own = ops.expand_dims(ops.slice(indices, (0,), (rows.shape[0],)), 1) == ops.range(0, slots, 1)
        # Zero without an adapter, where values may be NaN.
        has_adapter = own.any(1)
        rows = self.where(has_adapter, rows, self.zeros_like(rows))
        dy = self.where(has_adapter, dy, self.zeros_like(dy))
        used = ops.reshape(ops.range(0, max_rank, 1) < ops.expand_dims(ranks, 1), (-1,))
        adapters = ops.reshape(self.wide(pool), (-1, width))
        adapters = self.where(used, adapters, self.zeros_like(adapters))
        a, bt = ops.split(adapters, [in_channels, width - in_channels], 1)
        own = ops.repeat_interleave(ops.cast(own, rows.dtype), max_rank, 1)
        low = self.products.times_transposed(rows, a) * own
        d_low = self.products.times_transposed(dy, bt) * own
        scale = ops.repeat_interleave(ops.cast(scales, rows.dtype), max_rank, 0)
        dx = self.products.times(d_low * scale, a)
        da = self.products.transposed_times(d_low * scale, rows)
        db = self.products.transposed_times(low * scale, dy)
        dpool = ops.cast(ops.reshape(ops.concat((da, db), 1), pool.shape), pool.dtype)
        dscales = ops.reshape(ops.cast(low * d_low, mstype.float32).sum(0), (slots, max_rank)).sum(1)
        dx = ops.cast(ops.reshape(dx, x.shape), x.dtype)
        dy0 = ops.cast(ops.reshape(dout, y0.shape), y0.dtype)
        return dy0, dx, dpool, self.zeros_like(ranks), dscales, self.zeros_like(indices)


@constexpr
def _cell():
    return current_cell(MultiLoraDelta)


def multi_lora_delta(y0: Tensor, x: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
    r"""Returns the result of MultiLoraDelta, y[t] = y0[t] + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t].

    Args:
        y0, x, pool, ranks, scales, indices (Tensor): As the inputs of MultiLoraDelta.
    """
    return _cell()(y0, x, pool, ranks, scales, indices)
