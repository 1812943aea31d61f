"""rotary_embedding: rotates queries and keys by their tokens' positions, on a CPU."""

from typing import Tuple

from mindspore import Tensor, ops

from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_dtypes


class RotaryEmbedding(OperatorCell):
    r"""y = x * cos + rotate_half(x) * sin for each head of D numbers; rotate_half((a, b)) = (-b, a) for halves a, b.

    This is MindSpore's ApplyRotaryPosEmb with cosFormat 2, which has no kernel for a CPU, for one tensor. Its
    gradient rotates back, dx = dy * cos - rotate_half(dy * sin), and keeps only the tables, which are constants: their
    gradient is zero.

    Inputs:
        - **x** (Tensor) - Shape [T, heads * D] or [B, T, heads * D]; float32, float16 or bfloat16. Products are in
          float32.
        - **cos** (Tensor) - Shape [T, D]; one of these dtypes, not necessarily x's.
        - **sin** (Tensor) - Shape and dtype of cos.

    Outputs:
        Tensor of the shape and dtype of x.

    Raises:
        BackendError: The device is not a CPU, the library is not built, or a dtype is not supported.
        RuntimeError: A shape is wrong (raised by the kernel, which names it).

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """

    op = "rotary_embedding"
    inputs = 3

    def __init__(self):
        super().__init__()
        self.grad_kernel = CpuKernel("RotaryEmbeddingGrad", 3)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("x",), (x.dtype,))
        check_dtypes(self.op, self.path, ("cos", "sin"), (cos.dtype, sin.dtype))
        return self.kernel(x, cos, sin)

    def bprop(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, dout: Tensor) -> Tuple[Tensor, ...]:
        return self.grad_kernel(dout, cos, sin), ops.zeros_like(cos), ops.zeros_like(sin)
