"""Weights in 4-bit NormalFloat: NF4Dense, a frozen linear cell, and the stacked weights of routed experts."""

import math
from typing import Dict, Optional, Sequence, Set, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Constant, initializer

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.integers import TENSOR_NAMES as INTEGER_NAMES
from mindlora.core.numerics.nf4 import TENSOR_NAMES, Nf4Array, dequantize, layout, quantize, tensor_name
from mindlora.models.description import NOT_QUANTIZED_SHARDED
from mindlora.network.cells.cell import carry_settings
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight, Operands, check_holder
from mindlora.network.cells.linear_base import is_sharded
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


# Routed experts: their stacked weights, with and without an adapter


class DecodedWeight(Nf4Linear):
    """W = absmax' * TABLE[codes] as [experts, rows, columns], not kept for the backward, which decodes it again.

    W is decoded only once ``after``, of any shape, is computed. The other inputs are as in Nf4Linear, which describes
    paths and memory. Nothing gets a gradient.
    """

    def __init__(self, rows: int, columns: int, dtype: ms.Type):
        super().__init__()
        self.shape = (-1, rows, columns)
        self.like = Tensor(np.zeros((1, columns), np.float32), dtype)
        self.reshape = ops.Reshape()
        self.zeros_like = ops.ZerosLike()
        # With its output, which a call of recompute would leave out.
        self._recompute(True, True)

    def construct(self, after: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        return self.reshape(self.weight(self.like, after, codes, absmax, scales, offsets), self.shape)

    def bprop(
        self, after: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor, out: Tensor, dout: Tensor
    ) -> Tuple[Tensor, ...]:
        zeros = self.zeros_like
        return zeros(after), zeros(codes), zeros(absmax), zeros(scales), zeros(offsets)


class NF4ExpertWeight(ExpertWeight):
    """A stacked weight of experts in 4 bits, built by from_dense: y_e = x_e W_e with W = absmax' * TABLE[codes].

    W [experts * in, out] is quantized as one matrix (see mindlora.core.numerics.nf4), in blocks along its rows, and
    decoded into the dtype of the products when the layer computes, by plain operators or, on Ascend, by nf4_linear's
    kernel.

    Weights:
        weight uint8 [experts * in, blocks * 32], weight_absmax uint8 [experts * in, blocks], weight_scales and
        weight_offsets float32 [groups], with blocks = ceil(out / 64) and groups = ceil(experts * in * blocks / 256).
        Their names begin with that of the float weight, which the codes keep: mlp.experts.weight1,
        mlp.experts.weight1_absmax.

    Inputs and outputs are those of ExpertWeight.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    quantization = "nf4"
    tensor_names = tuple(TENSOR_NAMES.values())

    @classmethod
    def from_dense(cls, cell: ExpertWeight, prefix: str = "", array: Optional[Nf4Array] = None) -> "NF4ExpertWeight":
        """Quantizes a stacked weight and frees it in float, in FFNGroupedGEMM too.

        Args:
            cell (ExpertWeight): The weight.
            prefix (str): Its name in the network. Default: "", the name of the parameter.
            array (Nf4Array): The quantized weight. Default: None, quantize(weight).

        Raises:
            UnsupportedCellError: The weight cannot become separate from its FFNGroupedGEMM, or is sharded.
            QuantizationError: The weight holds infinity or NaN.
        """
        cls.check(cell)
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        self._holder = (cell.holder,)
        self.leaf = cell.leaf
        self.weight_dtype = cell.weight.dtype
        self.experts = cell.experts
        self.in_channels, self.out_channels = cell.in_channels, cell.out_channels
        self.dtype = cell.dtype
        self.product = cell.product
        name = prefix or cell.weight.name
        for attribute, parameter in packed_parameters(cell.weight, name, name, array).items():
            setattr(self, attribute, parameter)
        self.decode = self.decoder(self.dtype)
        carry_settings(cell, self)
        del cell.weight
        delattr(cell.holder, cell.leaf)
        return self

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        """Raises UnsupportedCellError, with the reason, for a weight that cannot be quantized."""
        check_holder(cell.holder)
        if is_sharded(cell.holder):
            raise UnsupportedCellError(NOT_QUANTIZED_SHARDED)

    def operands(self, after: Tensor) -> Operands:
        """Returns the factors of construct, read after ``after`` is computed; W stands in for the missing A and B."""
        weight = self.decode(after, self.weight, self.weight_absmax, self.weight_scales, self.weight_offsets)
        return weight, weight, weight

    def decoder(self, dtype: ms.Type) -> DecodedWeight:
        return DecodedWeight(self.in_channels, self.out_channels, dtype)

    def drop_float(self) -> None:
        """Reverses plain_cell: frees the weight in float."""
        delattr(self.holder, self.leaf)

    def plain_cell(self) -> ExpertWeight:
        """Returns the weight in float again, in FFNGroupedGEMM too."""
        weight = Tensor(dequantize(nf4_array(self)), self.weight_dtype)
        setattr(self.holder, self.leaf, Parameter(weight, name=self.weight.name, requires_grad=False))
        return ExpertWeight(self.holder, self.leaf)


class QLoRAExpertWeight(LoRAExpertWeight):
    """LoRAExpertWeight on the weight of an NF4ExpertWeight: y_e = x_e W_e + ((x_e A_e^T) * scale) B_e^T.

    Weights:
        As in NF4ExpertWeight, and mindpet_delta_lora_a [experts, r, in], mindpet_delta_lora_b [experts, out, r].

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return (NF4ExpertWeight,)
