"""NF4Dense: a frozen linear cell whose weight is 4-bit NormalFloat."""

import math
from typing import Dict, Optional, Sequence, Set, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Constant, initializer

from mindlora.core.numerics.integers import TENSOR_NAMES as INTEGER_NAMES
from mindlora.core.numerics.nf4 import TENSOR_NAMES, Nf4Array, dequantize, layout, quantize, tensor_name
from mindlora.network.cells.dense import LoRADense
from mindlora.network.quantized.quantized_dense import QuantizedBase, QuantizedDense
from mindlora.ops.nf4_linear import Nf4Linear


class NF4Dense(QuantizedDense):
    r"""A frozen linear cell, built by from_dense: y = activation(x W^T + bias) with W = absmax' * TABLE[codes].

    mindlora.core.numerics.nf4 defines the codes. W takes 4.13 bits per number. It is never held in float between two
    steps, and on a CPU not even within a step (see Nf4Linear). x gets a gradient, W does not.

    Weights:
        weight [out_channels, blocks * 32] uint8, the codes, two in a byte; weight_absmax [out_channels, blocks] uint8;
        weight_scales and weight_offsets [groups] float32; bias [out_channels], unchanged.
        blocks = ceil(in_channels / 64), groups = ceil(out_channels * blocks / 256).

    Attributes:
        quantization (str): "nf4".

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    quantization = "nf4"
    tensor_names = tuple(TENSOR_NAMES.values())

    @classmethod
    def from_dense(cls, cell: nn.Cell, prefix: str = "", array: Optional[Nf4Array] = None) -> "NF4Dense":
        """Quantizes a linear cell and frees its weight in float.

        Where the weight has no values yet (MindFormers builds networks that way when a checkpoint will fill them), the
        quantized weight is NaN until its tensors are loaded.

        Args:
            cell (nn.Dense or mindformers.modules.layers.Linear): The cell to replace.
            prefix (str): The prefix of its parameters, without the last dot. Default: empty, for a cell outside of a
                network.
            array (Nf4Array): The quantized weight. Default: None, quantize(weight).

        Raises:
            UnsupportedCellError: The cell is of another kind, sharded, or holds experts.
            QuantizationError: The weight holds infinity or NaN.
        """
        cls.check(cell)
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        self._adopt(cell, f"{prefix}." if prefix else "", array)
        return self

    def _adopt(self, cell, prefix, array):
        self._take(cell, Nf4Linear(), packed_parameters(cell.weight, f"{prefix}weight", prefix[:-1], array))

    @staticmethod
    def decode(tensors: Sequence[np.ndarray], columns: int, rows: slice) -> np.ndarray:
        return dequantize(Nf4Array(*tensors, shape=(len(tensors[0]), columns)), rows)


def packed_parameters(
    weight: Parameter, name: str, path: str, array: Optional[Nf4Array] = None
) -> Dict[str, Parameter]:
    """Returns the frozen parameters that replace a weight of this name, by attribute.

    They are ``array``, by default quantize(weight); NaN until they are loaded if the weight has no values yet. ``path``
    is the cell's, for errors; empty for a cell outside a network. A weight [experts, in, out] is quantized as
    the matrix [experts * in, out].
    """
    *rows, columns = weight.shape
    if array is None and has_values(weight):
        array = quantize(as_float32(weight).reshape(-1, columns), f"The weight of {path or 'the cell'}")
    packed = {}
    for field, (shape, dtype) in layout(math.prod(rows), columns).items():
        value = _unset(weight, shape, dtype) if array is None else Tensor.from_numpy(getattr(array, field))
        packed[TENSOR_NAMES[field]] = Parameter(value, name=tensor_name(name, field), requires_grad=False)
    return packed


def _unset(weight, shape, dtype):
    """Returns a tensor for a weight without values: NaN, or unallocated like the weight."""
    of_codes = dtype == np.uint8
    dtype = mstype.uint8 if of_codes else mstype.float32
    if weight.has_init:
        return initializer(Constant(0 if of_codes else np.nan), list(shape), dtype)
    with ms.DeviceCtx("meta"):
        return mint.empty(shape, dtype=dtype)


def has_values(weight: Parameter) -> bool:
    """Returns whether a parameter has values, rather than only a shape until a checkpoint is loaded."""
    return not weight.has_init and not getattr(weight, "is_meta", False)


def matrix_shape(cell: nn.Cell) -> Tuple[int, int]:
    """Returns the shape of W of a quantized cell: [out, in], or [experts * in, out] for stacked experts."""
    if hasattr(cell, "experts"):
        return cell.experts * cell.in_channels, cell.out_channels
    return cell.out_channels, cell.in_channels


def nf4_array(cell: nn.Cell) -> Nf4Array:
    """Returns the quantized weight of a cell, with or without an adapter, in NumPy."""
    return Nf4Array(
        **{field: getattr(cell, name).asnumpy() for field, name in TENSOR_NAMES.items()}, shape=matrix_shape(cell)
    )


def first_rows(cell: nn.Cell, rows: int) -> np.ndarray:
    """Returns the first ``rows`` rows of a quantized cell's W in float32, or all rows if it has fewer."""
    if hasattr(cell, "experts"):
        return dequantize(nf4_array(cell), slice(rows))
    return cell.by_rows()[:rows]


def as_float32(parameter: Parameter) -> np.ndarray:
    """Returns the values of a parameter as a NumPy array of float32 or float16, which may be a view of them."""
    array = parameter.asnumpy()
    return array if array.dtype in (np.float32, np.float16) else array.astype(np.float32)


def parameter_count(network: nn.Cell) -> int:
    """Returns the number of elements of all parameters, counting a quantized weight as W [out, in], as PEFT does."""
    sizes: Dict[int, int] = {}
    quantized = []
    for _, cell in network.cells_and_names():
        sizes.update({id(p): p.size for _, p in cell.parameters_and_names(expand=False)})
        if getattr(cell, "quantization", None):
            quantized.append(cell)
    packed: Set[int] = set()
    for cell in quantized:
        names = INTEGER_NAMES if hasattr(cell, "weight_zeros") else TENSOR_NAMES
        packed.update(id(getattr(cell, name)) for name in names.values())
    weights = sum(math.prod(matrix_shape(cell)) for cell in quantized)
    return weights + sum(size for key, size in sizes.items() if key not in packed)


class QLoRADense(LoRADense):
    r"""A quantized linear cell with a low-rank update: y = activation(x W^T + bias + ((dropout(x) A^T) * scale) B^T).

    W is the weight of the NF4Dense or IntegerDense that it adopts: quantized, frozen, without a gradient. A and B are
    floats, as in LoRADense.

    Only from_cell creates such a cell.

    Weights:
        As in the cell that it adopts, and mindpet_delta_lora_a [r, in_channels], mindpet_delta_lora_b
        [out_channels, r].

    Inputs and outputs are those of LoRADense.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    base_kind = QuantizedBase
