"""LoRAMintConv2d: LoRAConv2d for the convolutions of mindspore.mint, which models ported from PyTorch use."""

from typing import Optional, Tuple

from mindspore import Tensor, mint, nn

from mindlora.core.errors import UnsupportedCellError
from mindlora.network.cells.conv import LoRAConv2d


class MintConvBase(nn.Cell):
    """The three convolutions of a mint.nn.Conv2d with an adapter, as ConvBase has those of an nn.Conv2d."""

    def __init__(self, cell: nn.Cell, rank: int):
        super().__init__()
        self.conv2d = cell.conv2d
        self.stride = cell.stride
        self.padding = cell.padding
        self.groups = cell.groups
        # The operator of a padding that is given in words takes no numbers.
        self.no_padding = "valid" if isinstance(cell.padding, str) else (0, 0)

    @staticmethod
    def types() -> Tuple[type, ...]:
        return (mint.nn.Conv2d,)

    @staticmethod
    def check(cell: nn.Cell) -> None:
        if tuple(cell.dilation) != (1, 1) or cell.padding_mode != "zeros":
            raise UnsupportedCellError(
                f"{type(cell).__name__} of mindspore.mint has dilation {tuple(cell.dilation)} and padding_mode "
                f"{cell.padding_mode}: LoRA supports convolutions without dilation and with a border of zeros, as PEFT "
                "does. Add it to exclude_modules."
            )

    def conv(self, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        return self.conv2d(x, weight, bias, self.stride, self.padding, (1, 1), self.groups)

    def shrink(self, x: Tensor, a: Tensor) -> Tensor:
        return self.conv2d(x, a, None, self.stride, self.padding, (1, 1), 1)

    def expand(self, x: Tensor, b: Tensor) -> Tensor:
        return self.conv2d(x, b, None, (1, 1), self.no_padding, (1, 1), self.groups)


class LoRAMintConv2d(LoRAConv2d):
    """mint.nn.Conv2d with a low-rank update: y = conv(x, W) + bias + conv(conv(dropout(x), A) * scale, B).

    Weights, inputs and outputs are those of LoRAConv2d.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    base_kind = MintConvBase
