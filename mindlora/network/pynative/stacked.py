"""Several adapters beside each other on the linear cells of the models that MindFormers' PyNative Trainer runs."""

import operator
from typing import Optional, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from mindlora.core.numerics.dtypes import to_float32
from mindlora.models.variants.registry import PYNATIVE_STACKED
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.stacked_dense import StackedLoRAParallelLinear
from mindlora.network.pynative.linear import set_value
from mindlora.network.tensors import to_array


class StackedLoRAPyNativeLinear(StackedLoRAParallelLinear):
    """StackedLoRADense in the place of MindFormers' Linear, whose rows are side by side.

    Weights:
        Those of the cell that it adopts, whose weight may be 4-bit; stacked_lora_a [K, r, in_channels] and
        stacked_lora_b [K, out_channels, r] with r the largest rank. The names end as those that MindFormers takes for
        an adapter's, and differ from those of a single adapter.

    Inputs:
        - **input_** (Tensor) - Shape [sequence, batch, in_channels]; the second axis holds equal numbers of rows for
          the K adapters, those of the first one first.

    Outputs:
        Tensor of shape [sequence, batch, out_channels] and of the dtype of input_.
    """

    parameter_names = PYNATIVE_STACKED
    mindpet_delta_lora_a = property(operator.attrgetter(PYNATIVE_STACKED["A"]))
    mindpet_delta_lora_b = property(operator.attrgetter(PYNATIVE_STACKED["B"]))

    @classmethod
    def from_cells(
        cls, cell: nn.Cell, adapted: Sequence[Optional[LoRADense]], compute_dtype: Optional[str] = None
    ) -> "StackedLoRAPyNativeLinear":
        self = super().from_cells(cell, adapted, compute_dtype)
        # Tuples hide them from MindSpore, which would name and save their parameters a second time.
        self._base_cell = (cell,)
        self._adapted = tuple(adapted)
        # Tensor.backward() does not call the bprop of the cells that graph mode has for them.
        self.scale, self.swap = ops.Mul(), ops.Transpose()
        return self

    @staticmethod
    def _zeros(shape, dtype, name):
        # An initializer would have yet to make its values when the optimizer copies them.
        with ms.DeviceCtx("meta"):
            return Parameter(mint.empty(shape, dtype=dtype), name=name)

    @property
    def quantization(self) -> Optional[str]:
        """How W is quantized, as it is of a cell with one adapter."""
        return getattr(self._base_cell[0], "quantization", None)

    def reset_parameter(self) -> None:
        """Sets W and bias to their initial values, and A and B to those of the adapters."""
        self._base_cell[0].reset_parameter()
        for part, stacked in zip("AB", self.lora_parameters()):
            values = np.zeros(stacked.shape, np.float32)
            for number, cell in enumerate(self._adapted):
                if cell is not None:
                    own = to_float32(to_array(cell.parts()[part]))
                    values[(number, *map(slice, own.shape))] = own
            set_value(stacked, Tensor(values))

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        # The model passes a weight only to a cell without one of its own, which the adapters' cells refuse.
        return self.computed(input_)
