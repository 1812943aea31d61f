"""masked_attention: attention with a mask, for training on a CPU. No tensor of scores is kept."""

from typing import Tuple

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype

from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_fixed_dtypes

_NAMES = ("q", "k", "v", "mask", "scale")


class MaskedAttention(OperatorCell):
    r"""y = softmax(scale * q k^T + mask) v for each head.

    The backward computes the weights P = softmax(...) again, for a few queries at a time, so only q, k, v and mask
    are kept. With dP = dy v^T and dS = scale * P * (dP - sum(P * dP)): dq = dS k, dk = dS^T q, dv = P^T dy. The
    gradients of mask and scale are zero.

    Inputs:
        - **q** (Tensor) - Shape [B, T, N, D], float32.
        - **k** (Tensor) - Shape [B, T, M, D], float32; N is a multiple of M, and N / M heads of q share one of k.
        - **v** (Tensor) - Shape and dtype of k.
        - **mask** (Tensor) - Shape [B, 1, T, T], float32: 0 where a query sees a key. Where it does not, -10000 or
          less: such a key gets no weight, unless the query sees no key at all.
        - **scale** (Tensor) - Shape [1], float32.

    Outputs:
        Tensor [B, T, N, D], float32.

    Raises:
        BackendError: The device is not a CPU, the library is not built, or a dtype is not supported.
        RuntimeError: A shape is wrong (raised by the kernel, which names it).

    Source: Vaswani et al., Attention Is All You Need, 2017; the recomputation follows Dao et al., FlashAttention:
    Fast and Memory-Efficient Exact Attention with IO-Awareness, 2022.
    """

    op = "masked_attention"
    inputs = 5

    def __init__(self):
        super().__init__()
        self.grad_kernel = CpuKernel("MaskedAttentionGrad", 6)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        dtypes = q.dtype, k.dtype, v.dtype, mask.dtype, scale.dtype
        check_fixed_dtypes(self.op, self.path, _NAMES, dtypes, (mstype.float32,) * 5)
        return self.kernel(q, k, v, mask, scale)

    def bprop(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Tensor, out: Tensor, dout: Tensor
    ) -> Tuple[Tensor, ...]:
        # A kernel has a single output: the heads of the three gradients side by side.
        grads = self.grad_kernel(dout, q, k, v, mask, scale)
        keys, values = q.shape[2], q.shape[2] + k.shape[2]
        dq, dk, dv = grads[:, :, :keys], grads[:, :, keys:values], grads[:, :, values:]
        return dq, dk, dv, ops.zeros_like(mask), ops.zeros_like(scale)
