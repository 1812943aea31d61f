"""rounded_linear: multi_lora_linear with products in bfloat16, for serving on a CPU."""

from typing import Optional, Tuple

from mindspore import Tensor
from mindspore.common import dtype as mstype

from mindlora.ops.multi_lora_delta import INDEX_DTYPES, INDEX_NAMES
from mindlora.ops.nf4_linear import WEIGHT_DTYPES, WEIGHT_NAMES
from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_dtypes, check_fixed_dtypes


class RoundedLinear(OperatorCell):
    r"""y[t] = bf16(x[t]) W^T (+ bias) + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t], bf16 rounding to bfloat16.

    It is MultiLoraLinear, but for what the base's product takes: W is in bfloat16, or in 4-bit NormalFloat, each number
    of which is rounded to bfloat16 as it is decoded. Products of such numbers are exact in float32, in which all sums
    are; a processor with AVX512_BF16 has instructions for them. It takes any number of tokens, and has no gradient.

    Args:
        quantized (bool): Whether W is in NF4.
        has_bias (bool): Whether there is a bias.

    Inputs:
        - **x** (Tensor) - Shape [..., K], float32; all axes but the last are tokens.
        - **weight** (tuple of Tensor) - W, [N, K] bfloat16, alone; or codes, absmax, scales and offsets, as in
          Nf4Linear.
        - **pool** (Tensor) - Shape [slots, max_rank, K + N]; float32, float16 or bfloat16: see MultiLoraDelta.
        - **ranks**, **scales**, **indices** (Tensor) - As in MultiLoraDelta.
        - **bias** (Tensor) - Shape [N], float32. Default: None.

    Outputs:
        Tensor [..., N], float32.

    Raises:
        BackendError: A dtype is not supported.
        RuntimeError: A shape, rank or index is wrong (raised by the kernel, which names it).

    Source: Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019; Chen et al., Punica: Multi-Tenant
    LoRA Serving, 2023.
    """

    op = "rounded_linear"

    def __init__(self, quantized: bool, has_bias: bool):
        # x, the pool's three tensors and indices; W or its four tensors.
        self.inputs = 5 + (4 if quantized else 1) + has_bias
        super().__init__()
        self.quantized = quantized
        self.has_bias = has_bias
        if quantized:
            self.kernel = CpuKernel("RoundedNf4Linear", self.inputs)

    def construct(
        self,
        x: Tensor,
        weight: Tuple[Tensor, ...],
        pool: Tensor,
        ranks: Tensor,
        scales: Tensor,
        indices: Tensor,
        bias: Optional[Tensor] = None,
    ) -> Tensor:
        check_fixed_dtypes(self.op, self.path, ("x",), (x.dtype,), (mstype.float32,))
        check_dtypes(self.op, self.path, ("pool",), (pool.dtype,))
        dtypes = ranks.dtype, scales.dtype, indices.dtype
        check_fixed_dtypes(self.op, self.path, INDEX_NAMES, dtypes, INDEX_DTYPES)
        if self.quantized:
            codes, absmax, block_scales, offsets = weight
            dtypes = codes.dtype, absmax.dtype, block_scales.dtype, offsets.dtype
            check_fixed_dtypes(self.op, self.path, WEIGHT_NAMES, dtypes, WEIGHT_DTYPES)
        else:
            check_fixed_dtypes(self.op, self.path, ("W",), (weight[0].dtype,), (mstype.bfloat16,))
        if self.has_bias:
            check_fixed_dtypes(self.op, self.path, ("bias",), (bias.dtype,), (mstype.float32,))
            return self.kernel(x, *weight, pool, ranks, scales, indices, bias)
        return self.kernel(x, *weight, pool, ranks, scales, indices)
