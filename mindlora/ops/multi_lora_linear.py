"""multi_lora_linear: a frozen linear layer, with each token's own adapter, in one pass over the weight."""

from typing import Optional, Tuple

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops.primitive import constexpr

from mindlora.core.errors import BackendError
from mindlora.ops.multi_lora_delta import INDEX_DTYPES, INDEX_NAMES, MultiLoraDelta, check_pool
from mindlora.ops.operator_cell import OperatorCell, Products, check_dtypes, check_fixed_dtypes


@constexpr
def refuse_gradient(op: str) -> None:
    """Raises BackendError. Runs when the backward of a graph is compiled."""
    raise BackendError(
        f"{op} has no gradient: it serves adapters that are trained already. Train with {op.removeprefix('multi_')}."
    )


class MultiLoraLinear(OperatorCell):
    r"""y[t] = x[t] W^T + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t]; without the last term where i is negative.

    It is meant for the few tokens of a decode step in serving: it has no gradient, and requesting one is an
    error. On Ascend, which has no kernel for it, it is MatMul and multi_lora_delta.

    Inputs:
        - **x** (Tensor) - Shape [..., K]; float32, float16 or bfloat16; all axes but the last are tokens. All sums are
          in float32 on a CPU.
        - **w** (Tensor) - Shape [N, K], dtype of x; with x in float32 any of the three: it is widened as it is read.
        - **pool** (Tensor) - Shape [slots, max_rank, K + N], dtypes as for W: see MultiLoraDelta.
        - **ranks** (Tensor) - Shape [slots], int32: the rank of each adapter; 0 for an empty slot, which adds nothing.
        - **scales** (Tensor) - Shape [slots], float32.
        - **indices** (Tensor) - Shape [at least tokens], int32: as in MultiLoraDelta.

    Outputs:
        Tensor [..., N] of the dtype of x.

    Raises:
        BackendError: MINDLORA_BACKEND names a path that is not available, a dtype is not supported, or a gradient
            is requested.
        RuntimeError: A shape is wrong, or on the cpu path a rank or an index (raised by MindSpore or by the kernel,
            which names it).

    Source: Chen et al., Punica: Multi-Tenant LoRA Serving, 2023.
    """

    op = "multi_lora_linear"
    inputs = 6

    def __init__(self):
        super().__init__()
        self.products = Products()
        self.delta = MultiLoraDelta()

    def construct(self, x: Tensor, w: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
        self.check(w.dtype, pool.dtype, (x.dtype,), (ranks.dtype, scales.dtype, indices.dtype))
        if self.path == "cpu":
            return self.kernel(x, w, pool, ranks, scales, indices)
        return self.composed(x, w, pool, ranks, scales, indices)

    def check(self, weight: ms.dtype.Type, pool: ms.dtype.Type, dtypes: Tuple, index_dtypes: Tuple) -> None:
        """Raises BackendError for a dtype that is not supported. Runs when a graph is compiled."""
        check_dtypes(self.op, self.path, ("x", "bias"), dtypes)
        check_pool(self.op, self.path, "x", dtypes[0], pool, self.delta.widen)
        if dtypes[0] == ms.float32:
            check_dtypes(self.op, self.path, ("W",), (weight,))
        else:
            check_dtypes(self.op, self.path, ("x", "W"), (dtypes[0], weight))
        check_fixed_dtypes(self.op, self.path, INDEX_NAMES, index_dtypes, INDEX_DTYPES)

    def composed(
        self,
        x: Tensor,
        w: Tensor,
        pool: Tensor,
        ranks: Tensor,
        scales: Tensor,
        indices: Tensor,
        bias: Optional[Tensor] = None,
    ) -> Tensor:
        """The equation by MatMul, and multi_lora_delta on its own path."""
        y0 = self.products.times_transposed(ops.reshape(self.products.wide(x), (-1, x.shape[-1])), w)
        y0 = y0 if bias is None else y0 + self.products.wide(bias)
        return ops.cast(self.delta.without_library(y0, x, pool, ranks, scales, indices), x.dtype)

    def bprop(
        self,
        x: Tensor,
        w: Tensor,
        pool: Tensor,
        ranks: Tensor,
        scales: Tensor,
        indices: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tuple[Tensor, ...]:
        refuse_gradient(self.op)
        return x, w, pool, ranks, scales, indices


class MultiLoraLinearWithBias(MultiLoraLinear):
    r"""MultiLoraLinear with one more input, the bias that is added to every row.

    Inputs:
        - **x**, **w**, **pool**, **ranks**, **scales**, **indices** - As in MultiLoraLinear.
        - **bias** (Tensor) - Shape [N], dtype of x.

    Outputs:
        Tensor [..., N] of the dtype of x.
    """

    inputs = 7

    def construct(
        self, x: Tensor, w: Tensor, pool: Tensor, ranks: Tensor, scales: Tensor, indices: Tensor, bias: Tensor
    ) -> Tensor:
        self.check(w.dtype, pool.dtype, (x.dtype, bias.dtype), (ranks.dtype, scales.dtype, indices.dtype))
        if self.path == "cpu":
            return self.kernel(x, w, pool, ranks, scales, indices, bias)
        return self.composed(x, w, pool, ranks, scales, indices, bias)

    def bprop(
        self,
        x: Tensor,
        w: Tensor,
        pool: Tensor,
        ranks: Tensor,
        scales: Tensor,
        indices: Tensor,
        bias: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tuple[Tensor, ...]:
        refuse_gradient(self.op)
        return x, w, pool, ranks, scales, indices, bias
