"""The stacked weights of routed experts in 4-bit NormalFloat, with and without an adapter."""

from typing import Optional, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.nf4 import TENSOR_NAMES, Nf4Array, dequantize
from mindlora.models.description import NOT_QUANTIZED_SHARDED
from mindlora.network.cells.cell import carry_settings
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight, Operands, check_holder
from mindlora.network.cells.linear_base import is_sharded
from mindlora.network.quantized.nf4 import nf4_array, packed_parameters
from mindlora.ops.nf4_linear import Nf4Linear


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
