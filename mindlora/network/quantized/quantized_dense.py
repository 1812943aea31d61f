"""QuantizedDense: a frozen linear cell with a quantized weight of any form; and IntegerDense, of integers."""

from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Type

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Constant, initializer

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.dtypes import dtype_name
from mindlora.core.numerics.folding import Rows
from mindlora.core.numerics.integers import TENSOR_NAMES, IntegerArray, IntegerForm, dequantize, tensor_name
from mindlora.models.description import NOT_QUANTIZED_SHARDED
from mindlora.models.variants.variant import QUANTIZED
from mindlora.network.cells.cell import carry_settings
from mindlora.network.cells.linear_base import HeldWeight, LinearBase, adopt_linear, is_sharded
from mindlora.network.cells.low_rank import LowRankPicks
from mindlora.network.tensors import to_array
from mindlora.ops.integer_linear import IntegerLinear


class QuantizedDense(HeldWeight, nn.Cell):
    """Base of the cells y = activation(x W^T + bias) with a frozen, quantized W; a subclass defines its form.

    The subclass has the classmethod from_dense, which builds it, and ``decode``.

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

    @staticmethod
    def decode(tensors: Sequence[np.ndarray], columns: int, rows: slice) -> np.ndarray:
        """Returns rows of W, float32 [rows, columns], from the tensors of packed_weight."""
        raise NotImplementedError

    def by_rows(self) -> "DecodedRows":
        """Returns W by rows, each of them decoded when it is read."""
        return DecodedRows(self.decode, self.packed_weight(), self.in_channels)

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
        weight = Tensor(self.by_rows()[:], self.weight_dtype)
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


class DecodedRows:
    """W of a QuantizedDense in NumPy; ``[begin:end]`` decodes rows of it, float32 [rows, in_channels].

    Args:
        decode (callable): That of the form.
        tensors (tuple of Parameter): As packed_weight returns them.
        columns (int): in_channels.
    """

    def __init__(self, decode: Callable[..., np.ndarray], tensors: Sequence[Tensor], columns: int):
        self.decode, self.columns = decode, columns
        self.arrays = [to_array(tensor) for tensor in tensors]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.decode(self.arrays, self.columns, rows)


class QuantizedBase(LinearBase):
    """The base of QuantizedDense, whose product and form know how W is decoded."""

    def __init__(self, cell: nn.Cell, compute_dtype: Optional[str] = None, matmul: Optional[nn.Cell] = None):
        super().__init__(cell, compute_dtype, matmul)
        self.decode = cell.decode

    def times_rows(self, weight: Tuple[Tensor, ...], a: Tensor) -> Tensor:
        return self.stop_gradient(self.transpose(self.product(a, weight), (1, 0)))

    def squared_norms(self, stored: Tuple[Tensor, ...], after: Tensor) -> Tensor:
        # Not *stored: see product.
        if len(stored) == 3:
            codes, zeros, scales = stored
            return self.stop_gradient(self.matmul.squared_norms(after, codes, zeros, scales))
        codes, absmax, scales, offsets = stored
        return self.stop_gradient(self.matmul.squared_norms(after, codes, absmax, scales, offsets))

    def by_rows(self, stored: Tuple[Parameter, ...]) -> Rows:
        return DecodedRows(self.decode, stored, self.in_channels)

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


def on_quantized(kind: Type[nn.Cell]) -> Type[nn.Cell]:
    """Returns the class that is for cells with a weight in few bits what ``kind`` is for linear cells in float.

    It takes and returns what QLoRADense does.
    """
    document = f"{kind.__name__} on QuantizedDense."
    return type(f"Q{kind.__name__}", (kind,), {"__doc__": document, "__module__": __name__, "base_kind": QuantizedBase})


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
