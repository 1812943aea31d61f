"""rounded_linear: multi_lora_linear with products in bfloat16, one or several in a call, for serving on a CPU."""

from typing import Optional, Tuple

from mindspore import Tensor
from mindspore.common import dtype as mstype

from mindlora.ops.multi_lora_delta import INDEX_DTYPES, INDEX_NAMES
from mindlora.ops.nf4_linear import WEIGHT_DTYPES, WEIGHT_NAMES
from mindlora.ops.operator_cell import CpuKernel, OperatorCell, check_dtypes, check_fixed_dtypes


class RoundedLinear(OperatorCell):
    r"""y[t] = bf16(x[t]) W^T (+ bias) + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t], bf16 rounding to bfloat16.

    It is MultiLoraLinear with another product of the base: W is in bfloat16, or in 4-bit NormalFloat, each number
    of which is rounded to bfloat16 when decoded. Products of such numbers are exact in float32, in which all sums
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
        _check_product(self.op, self.path, weight, pool, ranks, scales, indices)
        if self.has_bias:
            check_fixed_dtypes(self.op, self.path, ("bias",), (bias.dtype,), (mstype.float32,))
            return self.kernel(x, *weight, pool, ranks, scales, indices, bias)
        return self.kernel(x, *weight, pool, ranks, scales, indices)


class RoundedLinears(OperatorCell):
    r"""Two or three RoundedLinear with the same x and indices in one call, with the same bits as separate calls.

    A call costs MindSpore 40 to 70 us in a step of few tokens, whatever it computes, and threads wait for one another
    at its end.

    Args:
        quantized, has_bias (bool): As in RoundedLinear, for all of them.
        count (int): Their number, 2 or 3.

    Inputs:
        - **x** (Tensor) - As in RoundedLinear.
        - **weights** (tuple of tuple of Tensor) - The ``weight`` of each.
        - **pools** (tuple of tuple of Tensor) - (pool, ranks, scales) of each; pools of one dtype.
        - **indices** (Tensor) - As in RoundedLinear.
        - **biases** (tuple of Tensor) - The bias of each. Default: ().

    Outputs:
        Tuple of Tensor [..., N], float32.

    Raises:
        BackendError, RuntimeError: As in RoundedLinear.
    """

    op = "rounded_linear"

    def __init__(self, quantized: bool, has_bias: bool, count: int):
        # x and indices; for each, a pool's three tensors, W or its four tensors, and a bias.
        self.inputs = 2 + count * (3 + (4 if quantized else 1) + has_bias)
        super().__init__()
        name = "RoundedNf4Linear" if quantized else "RoundedLinear"
        self.kernel = CpuKernel(f"{name}{count}", self.inputs, outputs=count)

    def construct(
        self,
        x: Tensor,
        weights: Tuple[Tuple[Tensor, ...], ...],
        pools: Tuple[Tuple[Tensor, Tensor, Tensor], ...],
        indices: Tensor,
        biases: Tuple[Tensor, ...] = (),
    ) -> Tuple[Tensor, ...]:
        check_fixed_dtypes(self.op, self.path, ("x",), (x.dtype,), (mstype.float32,))
        products = ()
        for weight, pool in zip(weights, pools):
            _check_product(self.op, self.path, weight, *pool, indices)
            products += (*weight, *pool)
        for bias in biases:
            check_fixed_dtypes(self.op, self.path, ("bias",), (bias.dtype,), (mstype.float32,))
        return self.kernel(x, *products, indices, *biases)


def _check_product(op, path, weight, pool, ranks, scales, indices):
    """Raises BackendError for a dtype of a product that the kernel does not take; a weight of one tensor is W."""
    check_dtypes(op, path, ("pool",), (pool.dtype,))
    dtypes = ranks.dtype, scales.dtype, indices.dtype
    check_fixed_dtypes(op, path, INDEX_NAMES, dtypes, INDEX_DTYPES)
    if len(weight) == 1:
        check_fixed_dtypes(op, path, ("W",), (weight[0].dtype,), (mstype.bfloat16,))
    else:
        codes, absmax, block_scales, offsets = weight
        dtypes = codes.dtype, absmax.dtype, block_scales.dtype, offsets.dtype
        check_fixed_dtypes(op, path, WEIGHT_NAMES, dtypes, WEIGHT_DTYPES)
