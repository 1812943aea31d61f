"""rotary_embedding: positions of tokens turned into the angles of their queries and keys, for serving on a CPU."""

from mindspore import Tensor

from mindlora.ops.operator_cell import OperatorCell, check_dtypes


class RotaryEmbedding(OperatorCell):
    r"""y = x * cos + rotate_half(x) * sin for each head of D numbers; rotate_half((a, b)) = (-b, a) for halves a, b.

    This is MindSpore's ApplyRotaryPosEmb with cosFormat 2, which has no kernel for a CPU, for one tensor. It has no
    gradient.

    Inputs:
        - **x** (Tensor) - Shape [T, heads * D] or [1, T, heads * D]; float32, float16 or bfloat16. Products are in
          float32.
        - **cos** (Tensor) - Shape [T, D]; one of these dtypes, not necessarily that of x.
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

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        check_dtypes(self.op, self.path, ("x",), (x.dtype,))
        check_dtypes(self.op, self.path, ("cos", "sin"), (cos.dtype, sin.dtype))
        return self.kernel(x, cos, sin)
