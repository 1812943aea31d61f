"""The stacked weights of routed experts in 4-bit NormalFloat, with and without an adapter."""

from typing import Optional, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindlora.config.description import NOT_QUANTIZED_SHARDED
from mindlora.errors import UnsupportedCellError
from mindlora.nn.cell import carry_settings
from mindlora.nn.experts import ExpertWeight, LoRAExpertWeight, Operands, check_holder
from mindlora.nn.linear_form import is_sharded
from mindlora.nn.nf4 import first_rows, nf4_array, packed_parameters
from mindlora.nn.qlora import OnNF4
from mindlora.numerics.nf4 import TENSOR_NAMES, Nf4Array, dequantize
from mindlora.ops.nf4_linear import Nf4Linear


class DecodedWeight(Nf4Linear):
    """W = absmax' * TABLE[codes], decoded again in the backward, so that a training step does not keep it.

    Args:
        rows, columns (int): Shape of each expert's matrix.
        dtype (mindspore.dtype): The dtype of the result.

    Inputs:
        - **after** (Tensor) - W is decoded only once this is computed; any shape.
        - **codes**, **absmax**, **scales**, **offsets** (Tensor) - As in Nf4Linear, which describes paths and memory.

    Outputs:
        Tensor [experts, rows, columns]. Nothing gets a gradient.
    """

    def __init__(self, rows: int, columns: int, dtype: ms.Type):
        super().__init__()
        self.shape = (-1, rows, columns)
        self.like = Tensor(np.zeros((1, columns), np.float32), dtype)
        self.reshape, self.zeros_like = ops.Reshape(), ops.ZerosLike()
        # With its output, which a call of recompute would leave out.
        self._recompute(True, True)

    def construct(self, after: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        return self.reshape(self.weight(self.like, after, codes, absmax, scales, offsets), self.shape)

    def bprop(
        self, after: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor, out: Tensor, dout: Tensor
    ) -> Tuple[Tensor, ...]:
        return (
            self.zeros_like(after),
            self.zeros_like(codes),
            self.zeros_like(absmax),
            self.zeros_like(scales),
            self.zeros_like(offsets),
        )


class NF4ExpertWeight(ExpertWeight):
    """A stacked weight of experts in 4 bits, made by from_dense: y_e = x_e W_e with W = absmax' * TABLE[codes].

    W [experts * in, out] is quantized as one matrix (see mindlora.numerics.nf4), in blocks along its rows, and decoded
    into the dtype of the products when the layer computes, by plain operators or, on Ascend, by nf4_linear's kernel.

    Weights:
        weight uint8 [experts * in, blocks * 32], weight_absmax uint8 [experts * in, blocks], weight_scales and
        weight_offsets float32 [groups], with blocks = ceil(out / 64) and groups = ceil(experts * in * blocks / 256).
        Their names begin with that of the float weight, which the codes keep: mlp.experts.weight1,
        mlp.experts.weight1_absmax.

    Attributes, inputs and outputs are those of ExpertWeight; quantization is "nf4".

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    quantization = "nf4"

    @classmethod
    def from_dense(cls, cell: ExpertWeight, prefix: str = "", array: Optional[Nf4Array] = None) -> "NF4ExpertWeight":
        """Quantizes a stacked weight and frees it in float, in FFNGroupedGEMM too.

        Args:
            cell (ExpertWeight): The weight.
            prefix (str): Its name in the network. Default: "", the name of the parameter.
            array (Nf4Array): The quantized weight. Default: None, quantize(weight).

        Raises:
            UnsupportedCellError: The weight cannot be taken out of its FFNGroupedGEMM, or is sharded.
            QuantizationError: The weight holds infinity or NaN.
        """
        cls.check(cell)
        self = cls.__new__(cls)
        nn.Cell.__init__(self)
        self._holder, self.leaf, self.weight_dtype = (cell.holder,), cell.leaf, cell.weight.dtype
        self.experts, self.in_channels, self.out_channels = cell.experts, cell.in_channels, cell.out_channels
        self.dtype, self.product, self.cast = cell.dtype, cell.product, cell.cast
        name = prefix or cell.weight.name
        for attribute, parameter in packed_parameters(cell.weight, name, name, array).items():
            setattr(self, attribute, parameter)
        self.decode = DecodedWeight(self.in_channels, self.out_channels, self.dtype)
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
        """Returns what construct multiplies by once ``after`` is computed; W stands in for the A and B it has not."""
        weight = self.decode(after, self.weight, self.weight_absmax, self.weight_scales, self.weight_offsets)
        return weight, weight, weight

    def plain_cell(self) -> ExpertWeight:
        """Returns the weight in float again, in FFNGroupedGEMM too."""
        weight = Tensor(dequantize(nf4_array(self)), self.weight_dtype)
        setattr(self.holder, self.leaf, Parameter(weight, name=self.weight.name, requires_grad=False))
        return ExpertWeight(self.holder, self.leaf)


class QLoRAExpertWeight(OnNF4, LoRAExpertWeight):
    """LoRAExpertWeight on the weight of an NF4ExpertWeight: y_e = x_e W_e + ((x_e A_e^T) * scale) B_e^T.

    Weights:
        As in NF4ExpertWeight, and mindpet_delta_lora_a [experts, r, in], mindpet_delta_lora_b [experts, out, r].

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    float_kind = LoRAExpertWeight

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return (NF4ExpertWeight,)

    def _adopt(self, cell, config):
        super()._adopt(cell, config)
        for name in TENSOR_NAMES.values():
            setattr(self, name, getattr(cell, name))
        self.decode = DecodedWeight(self.in_channels, self.out_channels, self.dtype)

    def float_weight(self, after: Tensor) -> Tensor:
        """Returns W, decoded once ``after`` is computed."""
        return self.decode(after, self.weight, self.weight_absmax, self.weight_scales, self.weight_offsets)

    def drop_float(self) -> None:
        """Undoes in_float: frees the float copy of W."""
        (quantized,) = self._adopted
        delattr(quantized.holder, quantized.leaf)

    def sample(self, rows: int) -> Tuple[np.ndarray, np.ndarray]:
        """Returns the first ``rows`` rows of W and of what the adapter adds to them, float32 [rows, out] each."""
        weight = first_rows(self, rows)
        a, b = (parameter.asnumpy().astype(np.float32) for parameter in self.lora_parameters())
        experts = -(-len(weight) // self.in_channels)
        change = np.float32(self.scale) * np.einsum("eri,eor->eio", a[:experts], b[:experts])
        return weight, change.reshape(-1, self.out_channels)[: len(weight)]

    def extend_repr(self) -> str:
        return f"{super().extend_repr()}, quantization={self.quantization}"
