"""LoRAMintConv2d: LoRAConv2d for the convolutions of mindspore.mint, which models ported from PyTorch use."""

from typing import Tuple

from mindspore import mint, nn

from mindlora.errors import UnsupportedCellError
from mindlora.nn.conv import LoRAConv2d


class LoRAMintConv2d(LoRAConv2d):
    """mint.nn.Conv2d with a low-rank update: y = conv(x, W) + bias + conv(conv(dropout(x), A) * scale, B).

    A has the kernel, stride and padding of W; B is 1 x 1 and has the groups of W, which must divide the rank.

    Weights:
        weight [out, in / groups, kh, kw], bias [out], mindpet_delta_lora_a [r, in, kh, kw],
        mindpet_delta_lora_b [out, r / groups, 1, 1].

    Inputs:
        - **x** (Tensor) - Shape [N, in, H, W].

    Outputs:
        Tensor of shape [N, out, H', W'] and of the dtype of x.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return (mint.nn.Conv2d,)

    @classmethod
    def _check_form(cls, cell):
        kind = type(cell).__name__
        if tuple(cell.dilation) != (1, 1) or cell.padding_mode != "zeros":
            raise UnsupportedCellError(
                f"{kind} of mindspore.mint has dilation {tuple(cell.dilation)} and padding_mode {cell.padding_mode}: "
                "LoRA supports convolutions without dilation and with a border of zeros, as PEFT does. Add it to "
                "exclude_modules."
            )

    @classmethod
    def groups_of(cls, cell: nn.Cell) -> int:
        return cell.groups

    def _adopt_operators(self, cell):
        self.has_bias, self.stride, self.padding = cell.bias is not None, cell.stride, cell.padding
        # The operator of a padding that is given in words takes no numbers.
        self.no_padding = "valid" if isinstance(cell.padding, str) else (0, 0)

    def _base(self, x):
        bias = self.cast(self.bias, self.dtype) if self.has_bias else None
        weight = self.cast(self.weight, self.dtype)
        return self.conv2d(x, weight, bias, self.stride, self.padding, (1, 1), self.group)

    def _shrink(self, x, a):
        return self.conv2d(x, a, None, self.stride, self.padding, (1, 1), 1)

    def _expand(self, x, b):
        return self.conv2d(x, b, None, (1, 1), self.no_padding, (1, 1), self.group)
