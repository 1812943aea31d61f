"""QLoRADense: LoRADense on a weight in 4-bit NormalFloat."""

from typing import Tuple, Type

import numpy as np
from mindspore import nn

from mindlora.config import LoraConfig
from mindlora.config.variants.variant import QUANTIZED
from mindlora.nn.cell import LoRACell, carry_settings, refuse_unsupported
from mindlora.nn.dense import LoRADense
from mindlora.nn.nf4 import NF4Dense, first_rows
from mindlora.numerics import initializers
from mindlora.numerics.nf4 import TENSOR_NAMES


class OnNF4:
    """What cells with an adapter on a 4-bit weight have in common, whatever the base.

    Attributes:
        float_kind (type): The same adapter on the weight in float.
    """

    float_kind: Type[LoRACell]

    @property
    def quantization(self) -> str:
        """How the base is quantized: "loftq" if W was quantized together with the initial A and B, else "nf4"."""
        return "loftq" if initializers.is_loftq(self.lora_init) else NF4Dense.quantization

    def in_float(self) -> LoRACell:
        """Returns a cell of float_kind with the same A and B on the plain cell with the dequantized weight."""
        (quantized,) = self._adopted
        config = LoraConfig(
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.dropout_rate,
            use_rslora=self.use_rslora,
            compute_dtype=str(self.dtype),
            freeze_lora_a=self.freeze_lora_a,
        )
        lora = self.float_kind.from_cell(quantized.plain_cell(), config)
        lora.mindpet_delta_lora_a, lora.mindpet_delta_lora_b = self.mindpet_delta_lora_a, self.mindpet_delta_lora_b
        carry_settings(self, lora)
        return lora


class QLoRADense(OnNF4, LoRADense):
    r"""A quantized linear cell with a low-rank update: y = activation(x W^T + bias + ((dropout(x) A^T) * scale) B^T).

    W = absmax' * TABLE[codes] is the weight of the NF4Dense that it adopts: 4.13 bits per number, frozen, without a
    gradient. A and B are in float, as in LoRADense.

    Only from_cell creates such a cell.

    Weights:
        As in NF4Dense, and mindpet_delta_lora_a [r, in_channels], mindpet_delta_lora_b [out_channels, r].

    Inputs:
        - **x** (Tensor) - Shape [..., in_channels].

    Outputs:
        Tensor of shape [..., out_channels] and of the dtype of x.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    float_kind = LoRADense

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return (NF4Dense,)

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        refuse_unsupported(config, QUANTIZED)

    def _adopt(self, cell, config):
        super()._adopt(cell, config)
        for name in TENSOR_NAMES.values():
            setattr(self, name, getattr(cell, name))

    def _pick_low_rank(self, strategy):
        # The operator for a decode step needs W in float.
        return super()._pick_low_rank(strategy)._replace(decode=None)

    def _base_product(self, x):
        return self.matmul(x, self.weight, self.weight_absmax, self.weight_scales, self.weight_offsets)

    def drop_float(self) -> None:
        """Undoes in_float: frees the float copy of W."""
        del self._adopted[0].emptied_cell.weight

    def sample(self, rows: int) -> Tuple[np.ndarray, np.ndarray]:
        """Returns the first ``rows`` rows of W and of scale B A, float32 [rows, in_channels] each."""
        a, b = (parameter.asnumpy().astype(np.float32) for parameter in self.lora_parameters())
        return first_rows(self, rows), (b[:rows] * np.float32(self.scale)) @ a

    def extend_repr(self) -> str:
        return f"{super().extend_repr()}, quantization={self.quantization}"
