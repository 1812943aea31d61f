"""LoRAConv2d: a frozen convolution with a trainable low-rank path beside it."""

from typing import Optional, Tuple, Type

from mindspore import Tensor, mint, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.pair_shapes import CONVOLUTION
from mindlora.models.lora_config import LoraConfig
from mindlora.network.cells.cell import LoRACell, groups_of, refuse_own_forward, refuse_unsupported


class ConvBase(nn.Cell):
    """The three convolutions of an nn.Conv2d with an adapter: operators without parameters, as in LinearBase."""

    def __init__(self, cell: nn.Cell, rank: int):
        super().__init__()
        self.conv2d = cell.conv2d
        self.bias_add = cell.bias_add if cell.has_bias else None
        self.lora_a_conv = ops.Conv2D(
            rank, cell.kernel_size, pad_mode=cell.pad_mode, pad=cell.padding, stride=cell.stride
        )
        self.lora_b_conv = ops.Conv2D(cell.out_channels, 1, group=cell.group)

    @staticmethod
    def types() -> Tuple[type, ...]:
        """Returns the classes of the cells."""
        return (nn.Conv2d,)

    @staticmethod
    def check(cell: nn.Cell) -> None:
        """Raises UnsupportedCellError, with the reason, for a form of the cell that can carry no adapter."""
        kind = type(cell).__name__
        if cell.data_format != "NCHW" or tuple(cell.dilation) not in ((1, 1), (1, 1, 1, 1)):
            raise UnsupportedCellError(
                f"{kind} has data_format {cell.data_format} and dilation {cell.dilation}: LoRA supports NCHW "
                "convolutions without dilation, as PEFT does. Add it to exclude_modules."
            )
        if getattr(cell.conv2d, "in_strategy", None) is not None:
            raise UnsupportedCellError(
                f"{kind} is sharded, but LoRA on sharded convolutions is not supported. Add it to exclude_modules."
            )

    def conv(self, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        """conv(x, W) + bias."""
        y = self.conv2d(x, weight)
        return y if bias is None else self.bias_add(y, bias)

    def shrink(self, x: Tensor, a: Tensor) -> Tensor:
        """conv(x, A)."""
        return self.lora_a_conv(x, a)

    def expand(self, x: Tensor, b: Tensor) -> Tensor:
        """conv(x, B)."""
        return self.lora_b_conv(x, b)


class LoRAConv2d(LoRACell):
    """A convolution with a low-rank update: y = conv(x, W) + bias + conv(conv(dropout(x), A) * scale, B).

    As in PEFT, A has the kernel, stride and padding of W and no groups; B is 1 x 1 and has the groups of W, which must
    divide the rank. With one group, merging adds scale B A to W. With several, A reads all channels and each group of W
    only some, so the adapter cannot be merged into W.

    Weights:
        weight [out, in / groups, kh, kw], bias [out], mindpet_delta_lora_a [r, in, kh, kw],
        mindpet_delta_lora_b [out, r / groups, 1, 1].

    Inputs:
        - **x** (Tensor) - Shape [N, in, H, W].

    Outputs:
        Tensor of shape [N, out, H', W'] and of the dtype of x.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    layout = CONVOLUTION
    base_kind: Type[nn.Cell] = ConvBase

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return cls.base_kind.types()

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        kind = type(cell).__name__
        refuse_own_forward(cell, cls.base_types(), "LoRAConv2d")
        cls.base_kind.check(cell)
        group = groups_of(cell)
        if config.lora_rank % group:
            raise UnsupportedCellError(
                f"{kind} has {group} groups, which do not divide lora_rank {config.lora_rank}. Choose a rank that they "
                "divide (rank_pattern), or add it to exclude_modules."
            )
        refuse_unsupported(config, cls.layout.cells)

    @classmethod
    def weight_shape(cls, cell: nn.Cell) -> Tuple[int, ...]:
        return tuple(cell.weight.shape)

    def _adopt(self, cell, config):
        self.in_channels, self.out_channels = cell.in_channels, cell.out_channels
        self.group = groups_of(cell)
        self.kernel_size = cell.kernel_size
        self.weight = cell.weight
        self.bias = cell.bias
        self.has_bias = cell.bias is not None
        self.base = self.base_kind(cell, self.lora_rank)
        self.dtype = getattr(mstype, config.compute_dtype) if config.compute_dtype else cell.weight.dtype
        if self.dropout_rate > 0:
            self.lora_dropout = nn.Dropout(p=self.dropout_rate)
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        input_dtype = x.dtype
        x = self.cast(x, self.dtype)
        bias = self.cast(self.bias, self.dtype) if self.has_bias else None
        y = self.base.conv(x, self.cast(self.weight, self.dtype), bias)
        if self.dropout_rate > 0 and self.training:
            x = self.lora_dropout(x)
        low_rank = self.base.shrink(x, self.cast(self.mindpet_delta_lora_a, self.dtype))
        low_rank = low_rank * self.cast(self.scale, self.dtype)
        y = y + self.base.expand(low_rank, self.cast(self.mindpet_delta_lora_b, self.dtype))
        return self.cast(y, input_dtype)

    def extend_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, kernel_size={self.kernel_size}, "
            f"group={self.group}, lora_rank={self.lora_rank}, lora_alpha={self.lora_alpha}, "
            f"lora_dropout={self.dropout_rate}, compute_dtype={self.dtype}"
        )


# LoRAMintConv2d: LoRAConv2d for the convolutions of mindspore.mint, which models ported from PyTorch use.


class MintConvBase(nn.Cell):
    """The three convolutions of a mint.nn.Conv2d with an adapter, like ConvBase for an nn.Conv2d."""

    def __init__(self, cell: nn.Cell, rank: int):
        super().__init__()
        self.conv2d = cell.conv2d
        self.stride = cell.stride
        self.padding = cell.padding
        self.groups = cell.groups
        # The operator for a named padding takes no numbers.
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

    Weights, inputs and outputs are as in LoRAConv2d.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    base_kind = MintConvBase
