"""QLoRADense: LoRADense on a weight in 4-bit NormalFloat."""

from typing import Any, Tuple

from mindspore import nn
from mindspore.common import dtype as mstype

from mindlora.models.variants.variant import QUANTIZED
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.linear_base import LinearBase
from mindlora.network.cells.low_rank import LowRankPicks
from mindlora.network.quantized.nf4 import NF4Dense


class Nf4Base(LinearBase):
    """The base of NF4Dense."""

    @staticmethod
    def types() -> Tuple[type, ...]:
        return (NF4Dense,)

    @classmethod
    def check(cls, cell: nn.Cell) -> None:
        """Takes every such cell."""

    @classmethod
    def traits(cls, cell: nn.Cell) -> Tuple[str, ...]:
        return (QUANTIZED,)

    @staticmethod
    def operators(cell: nn.Cell) -> Tuple[Any, Any, mstype.Type]:
        return cell.base.matmul, cell.base.bias_add, cell.dtype

    def pick_low_rank(self, rank: int, dropout_rate: float) -> LowRankPicks:
        # The operator for a decode step needs W in float.
        return super().pick_low_rank(rank, dropout_rate)._replace(decode=None)


class QLoRADense(LoRADense):
    r"""A quantized linear cell with a low-rank update: y = activation(x W^T + bias + ((dropout(x) A^T) * scale) B^T).

    W = absmax' * TABLE[codes] is the weight of the NF4Dense that it adopts: 4.13 bits per number, frozen, without a
    gradient. A and B are in float, as in LoRADense.

    Only from_cell creates such a cell.

    Weights:
        As in NF4Dense, and mindpet_delta_lora_a [r, in_channels], mindpet_delta_lora_b [out_channels, r].

    Inputs and outputs are those of LoRADense.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """

    base_kind = Nf4Base
