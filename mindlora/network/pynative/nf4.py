"""4-bit NormalFloat in the models that MindFormers' PyNative Trainer runs: linear cells and routed experts.

MindFormers builds a model without values and loads its base later: the cells are built for a weight without values, and
are NaN until the tensors of a quantized one are loaded.
"""

from typing import Optional, Tuple, Type

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindlora.core.errors import MergeError
from mindlora.core.numerics.nf4 import TENSOR_NAMES, Nf4Array
from mindlora.network.cells.experts import GroupedProduct
from mindlora.network.cells.linear_base import pynative_linear_types
from mindlora.network.pynative.experts import PyNativeExperts, PyNativeExpertWeight, check_grouped_mlp
from mindlora.network.pynative.linear import (
    PyNativeBase,
    WholePyNativeLinear,
    adopt_settings,
    names_of,
    on_linear,
    set_value,
)
from mindlora.network.quantized.nf4 import DecodedWeight, NF4Dense, QLoRADense, packed_parameters
from mindlora.network.quantized.quantized_dense import QuantizedBase
from mindlora.ops.operator_cell import CellWithBprop


class NF4PyNativeLinear(NF4Dense):
    """NF4Dense for MindFormers' Linear, of which it is an instance too.

    Weights:
        As in NF4Dense.

    Inputs:
        - **input_** (Tensor) - Shape [..., in_channels].
        - **weight** - None: the cell has its own weight.

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of input_.
    """

    base_kind = PyNativeBase

    @classmethod
    def from_dense(cls, cell: nn.Cell, prefix: str = "", array: Optional[Nf4Array] = None) -> "NF4PyNativeLinear":
        cls.check(cell)
        return super(NF4PyNativeLinear, on_linear(cls, *pynative_linear_types())).from_dense(cell, prefix, array)

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        cls.base_kind.check(cell)

    def _adopt(self, cell, prefix, array):
        adopt_settings(self, cell)
        super()._adopt(cell, prefix, array)

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        return super().construct(input_)

    def reset_parameter(self) -> None:
        """Makes W NaN until it is loaded, and sets the bias to its initial value."""
        reset_packed(self)


class Nf4PyNativeBase(QuantizedBase):
    """The base of NF4PyNativeLinear."""

    @staticmethod
    def types() -> Tuple[type, ...]:
        return (NF4PyNativeLinear,)


class OnNf4:
    """What the adapters on NF4PyNativeLinear have in common; it comes before the class of the adapter."""

    base_kind = Nf4PyNativeBase

    def reset_linear(self) -> None:
        """Makes W NaN until it is loaded, and sets the bias to its initial value."""
        reset_packed(self)


def on_nf4(kind: Type[nn.Cell]) -> Type[nn.Cell]:
    """Returns the class that is for NF4PyNativeLinear what ``kind`` is for MindFormers' Linear in float."""
    members = {"__doc__": f"{kind.__name__} on NF4PyNativeLinear.", "__module__": __name__}
    return type(f"Q{kind.__name__}", (OnNf4, kind), members)


class QLoRAPyNativeLinear(OnNf4, WholePyNativeLinear, QLoRADense):
    """QLoRADense for MindFormers' Linear.

    Weights:
        As in NF4Dense, and lora_a [r, in_channels], lora_b [out_channels, r].

    Inputs and outputs are those of LoRAPyNativeLinear.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    parameter_names = names_of("A", "B")


class NF4PyNativeExpertWeight(PyNativeExpertWeight):
    """A stacked weight of experts in 4 bits, built by from_dense: y_e = x_e W_e with W = absmax' * TABLE[codes].

    W is quantized as one matrix [experts * in, out], as in NF4ExpertWeight, and decoded into the dtype of the products
    where it is multiplied by, and again in the backward.

    Weights, of the holder:
        weight1 uint8 [experts * in, blocks * 32], weight1_absmax uint8 [experts * in, blocks], weight1_scales and
        weight1_offsets float32 [groups], or weight2 and so on; blocks and groups as in NF4ExpertWeight.

    Inputs and outputs are those of PyNativeExpertWeight.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    quantization = "nf4"

    @classmethod
    def from_dense(
        cls, cell: PyNativeExpertWeight, prefix: str = "", array: Optional[Nf4Array] = None
    ) -> "NF4PyNativeExpertWeight":
        """Quantizes a stacked weight; the weight in float is freed once this one is put into its experts.

        Args:
            cell (PyNativeExpertWeight): The weight.
            prefix (str): Its name in the network. Default: "", the name of the parameter.
            array (Nf4Array): The quantized weight. Default: None, quantize(weight).

        Raises:
            UnsupportedCellError: The experts have a forward of their own.
            QuantizationError: The weight holds infinity or NaN.
        """
        cls.check(cell)
        self = cls(cell.holder, cell.leaf)
        self.product = DecodedProduct(self.in_channels, self.out_channels, self.dtype)
        name = prefix or cell.weight.name
        self._made = (packed_parameters(cell.weight, name, name, array),)
        if isinstance(cell.holder, PyNativeExperts):
            self.put_into(cell.holder)
        return self

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        """Raises UnsupportedCellError, with the reason, for a weight that cannot be quantized."""
        check_grouped_mlp(cell.holder)

    def put_into(self, experts: PyNativeExperts) -> None:
        """Makes the experts the holder, in which the quantized weight replaces the one in float."""
        super().put_into(experts)
        experts.drop_float(self.leaf)
        (packed,) = self._made
        for name, parameter in packed.items():
            setattr(experts, self._name(name), parameter)

    def reset_parameter(self) -> None:
        """Makes W NaN until it is loaded."""
        reset_packed(self)

    def construct(self, x: Tensor, groups: Tensor) -> Tensor:
        return self.product(x, groups, self.weight, self.weight_absmax, self.weight_scales, self.weight_offsets)

    def plain_cell(self) -> nn.Cell:
        """Raises MergeError, since such weights are merged in files."""
        raise MergeError(
            f"{self.weight.name} is quantized, and is not turned into float under MindFormers' PyNative Trainer. Merge "
            "the saved adapter into the base in float (mindlora base merge)."
        )

    @property
    def weight_absmax(self) -> Parameter:
        """The absmax of each block, in steps between the least and the largest of its group."""
        return self._tensor("weight_absmax")

    @property
    def weight_scales(self) -> Parameter:
        """The steps of each group."""
        return self._tensor("weight_scales")

    @property
    def weight_offsets(self) -> Parameter:
        """The least absmax of each group."""
        return self._tensor("weight_offsets")

    def _tensor(self, name):
        return getattr(self.holder, self._name(name))

    def _name(self, name):
        """Returns the holder's name for the tensor that other quantized cells call weight, weight_absmax and so on."""
        return self.leaf + name[len("weight") :]


class DecodedProduct(CellWithBprop):
    """x_e W_e for the tokens x_e of each expert, with W in 4 bits, which is decoded again in the backward.

    Args:
        in_channels (int): Size of the last axis of x.
        out_channels (int): Size of the last axis of the product.
        dtype (mindspore.dtype): The dtype of the product.

    Inputs:
        - **x** (Tensor) - Shape [tokens, in_channels], sorted by expert.
        - **groups** (Tensor) - int64, the token after each expert's last.
        - **codes**, **absmax**, **scales**, **offsets** (Tensor) - W, as in Nf4Linear, which has the paths.

    Outputs:
        Tensor of shape [tokens, out_channels]. Only x gets a gradient.
    """

    def __init__(self, in_channels: int, out_channels: int, dtype: ms.Type):
        super().__init__()
        self.decode = DecodedWeight(in_channels, out_channels, dtype)
        self.product = GroupedProduct(in_channels, out_channels)
        self.product_of_gradient = GroupedProduct(out_channels, in_channels)

    def construct(
        self, x: Tensor, groups: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offsets: Tensor
    ) -> Tensor:
        return self.product(x, self.decode(x, codes, absmax, scales, offsets), groups)

    def bprop(
        self,
        x: Tensor,
        groups: Tensor,
        codes: Tensor,
        absmax: Tensor,
        scales: Tensor,
        offsets: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tuple[Tensor, ...]:
        weight = ops.transpose(self.decode(dout, codes, absmax, scales, offsets), (0, 2, 1))
        dx = ops.cast(self.product_of_gradient(dout, weight, groups), x.dtype)
        return dx, *map(ops.zeros_like, (groups, codes, absmax, scales, offsets))


def reset_packed(cell: nn.Cell) -> None:
    """Makes the quantized weight of a cell NaN, until it is loaded, and its bias zero."""
    for name in TENSOR_NAMES.values():
        parameter = getattr(cell, name)
        unset = 0 if parameter.dtype == ms.uint8 else np.nan
        set_value(parameter, Tensor(np.full(parameter.shape, unset), parameter.dtype))
    if getattr(cell, "bias", None) is not None:
        cell.bias.zero_()
