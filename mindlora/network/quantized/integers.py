"""IntegerDense: a frozen linear cell whose weight is in integers of 4 or 8 bits, as published."""

from typing import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn
from mindspore.common.initializer import Constant, initializer

from mindlora.core.numerics.dtypes import dtype_name
from mindlora.core.numerics.integers import TENSOR_NAMES, IntegerArray, IntegerForm, dequantize, tensor_name
from mindlora.network.quantized.quantized_dense import QuantizedDense
from mindlora.network.tensors import to_array
from mindlora.ops.integer_linear import IntegerLinear


class IntegerDense(QuantizedDense):
    r"""A frozen linear cell, built by from_dense: y = activation(x W^T + bias) with W = (codes - zeros) * scales.

    mindlora.core.numerics.integers defines the bytes. W takes 4 or 8 bits per number, plus its scales and
    zeros. It is never held in float (see IntegerLinear). x gets a gradient, W does not. It runs on a CPU.

    Weights:
        weight [out_channels, in_channels * bits / 8] uint8, the codes; weight_zeros [out_channels, groups] uint8;
        weight_scales [out_channels, groups] of float32, float16 or bfloat16; bias [out_channels], unchanged.

    Attributes:
        quantization (str): "int4" or "int8".

    Source: Frantar et al., GPTQ, 2023; Dettmers et al., LLM.int8(), 2022, for such weights.
    """

    tensor_names = tuple(TENSOR_NAMES.values())
    in_integers = True

    @classmethod
    def from_dense(cls, cell: nn.Cell, prefix: str, form: IntegerForm) -> "IntegerDense":
        """Replaces a linear cell and frees its weight; load_base fills the new one, which is NaN until then.

        Args:
            cell (nn.Dense or mindformers.modules.layers.Linear): The cell to replace.
            prefix (str): The prefix of its parameters, without the last dot.
            form (IntegerForm): The form of its weight.

        Raises:
            UnsupportedCellError: The cell is of another kind, sharded, or holds experts.
            BackendError: The device is not a CPU, or the library of mindlora's operators is missing.
        """
        cls.check(cell)
        matmul = IntegerLinear(form.bits)
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        self.quantization = f"int{form.bits}"
        parameters = {}
        for field, (shape, dtype) in form.layout(*cell.weight.shape).items():
            value = initializer(
                Constant(0 if dtype == np.uint8 else np.nan), list(shape), getattr(ms, dtype_name(dtype))
            )
            name = tensor_name(f"{prefix}.weight", field)
            parameters[TENSOR_NAMES[field]] = Parameter(value, name=name, requires_grad=False)
        self._take(cell, matmul, parameters)
        return self

    @staticmethod
    def decode(tensors: Sequence[np.ndarray], columns: int, rows: slice) -> np.ndarray:
        codes, zeros, scales = (tensor[rows] for tensor in tensors)
        return dequantize(IntegerArray(codes, zeros, scales, bits=8 * codes.shape[1] // columns))


def integer_array(cell: nn.Cell) -> IntegerArray:
    """Returns the integer weight of a cell, with or without an adapter, in NumPy."""
    fields = {field: to_array(getattr(cell, name)) for field, name in TENSOR_NAMES.items()}
    return IntegerArray(**fields, bits=8 * fields["codes"].shape[1] // cell.in_channels)
