"""QuantizedDense: a frozen linear cell with a quantized weight of any form."""

from typing import Any, Dict, Tuple, Type

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import UnsupportedCellError
from mindlora.models.description import NOT_QUANTIZED_SHARDED
from mindlora.models.variants.variant import QUANTIZED
from mindlora.network.cells.cell import carry_settings
from mindlora.network.cells.linear_base import HeldWeight, LinearBase, adopt_linear, is_sharded
from mindlora.network.cells.low_rank import LowRankPicks


class QuantizedDense(HeldWeight, nn.Cell):
    """Base of the cells y = activation(x W^T + bias) with a frozen, quantized W; a subclass defines its form.

    The subclass has the classmethod from_dense, which builds it, and ``decoded``.

    Attributes:
        quantization (str): The form.
        tensor_names (tuple of str): The attributes that hold W, the codes first.
        dtype (mindspore.dtype): The dtype of the products, as in the plain cell.
        weight_dtype (mindspore.dtype): The dtype in which W was stored.

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.
    """

    quantization: str
    tensor_names: Tuple[str, ...]
    in_integers = False
    base_kind: Type[LinearBase] = LinearBase

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        """Raises UnsupportedCellError, with the reason, for a cell that cannot be quantized."""
        cls.base_kind.check(cell)
        if is_sharded(cell):
            raise UnsupportedCellError(NOT_QUANTIZED_SHARDED)

    def _take(self, cell: nn.Cell, matmul: nn.Cell, parameters: Dict[str, Parameter]) -> None:
        """Replaces a cell, with the product ``matmul`` and parameters by attribute."""
        adopt_linear(self, cell, self.base_kind(cell, matmul=matmul))
        self.weight_dtype = cell.weight.dtype
        for name, parameter in parameters.items():
            setattr(self, name, parameter)
        self.bias = cell.bias
        carry_settings(cell, self)
        # The tuple hides it from MindSpore. It must lose its weight, which would otherwise stay in memory.
        self._emptied = (cell,)
        del cell.weight

    def decoded(self) -> np.ndarray:
        """Returns W, float32 [out_channels, in_channels]."""
        raise NotImplementedError

    def construct(self, x: Tensor) -> Tensor:
        y = self.base.linear(self.base.tokens(x), self.packed_weight(), self.bias)
        if self.activation_flag:
            y = self.activation(y)
        return self.base.like(y, x)

    @property
    def emptied_cell(self) -> nn.Cell:
        """The replaced cell, without its weight."""
        return self._emptied[0]

    def plain_cell(self) -> nn.Cell:
        """Returns the replaced cell, with the dequantized weight."""
        cell = self.emptied_cell
        weight = Tensor(self.decoded(), self.weight_dtype)
        cell.weight = Parameter(weight, name=self.weight.name, requires_grad=False)
        carry_settings(self, cell)
        return cell

    def drop_float(self) -> None:
        """Reverses plain_cell: frees the weight in float."""
        del self.emptied_cell.weight

    def extend_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, has_bias={self.has_bias}, "
            f"compute_dtype={self.dtype}"
        )


class QuantizedBase(LinearBase):
    """The base of QuantizedDense."""

    @staticmethod
    def types() -> Tuple[type, ...]:
        return (QuantizedDense,)

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        """Accepts every such cell."""

    @classmethod
    def traits(cls, cell: nn.Cell) -> Tuple[str, ...]:
        return (QUANTIZED,)

    @staticmethod
    def operators(cell: nn.Cell) -> Tuple[Any, Any, mstype.Type]:
        return cell.base.matmul, cell.base.bias_add, cell.dtype

    def pick_low_rank(self, rank: int, dropout_rate: float) -> LowRankPicks:
        # The operator for a decode step needs W in float.
        return super().pick_low_rank(rank, dropout_rate)._replace(decode=None)
