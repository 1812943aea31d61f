"""LoRAConv2d: a frozen convolution with a trainable low-rank path beside it."""

from typing import Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.config import LoraConfig
from mindlora.errors import UnsupportedCellError
from mindlora.nn.cell import LoRACell, carry_settings, refuse_unsupported
from mindlora.nn.initial_values import initial_values
from mindlora.numerics.pair_layouts import CONVOLUTION


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

    @classmethod
    def base_types(cls) -> Tuple[type, ...]:
        return (nn.Conv2d,)

    @classmethod
    def check(cls, cell: nn.Cell, config: LoraConfig) -> None:
        kind = type(cell).__name__
        if not any(type(cell).construct is base.construct for base in cls.base_types()):
            raise UnsupportedCellError(
                f"{kind} has a forward of its own, which LoRAConv2d would drop. Add it to exclude_modules."
            )
        cls._check_form(cell)
        group = cls.groups_of(cell)
        if config.lora_rank % group:
            raise UnsupportedCellError(
                f"{kind} has {group} groups, which do not divide lora_rank "
                f"{config.lora_rank}. Choose a rank that they divide (rank_pattern), or add it to "
                "exclude_modules."
            )
        refuse_unsupported(config, cls.layout.cells)

    @classmethod
    def _check_form(cls, cell):
        kind = type(cell).__name__
        if cell.data_format != "NCHW" or tuple(cell.dilation) not in ((1, 1), (1, 1, 1, 1)):
            raise UnsupportedCellError(
                f"{kind} has data_format {cell.data_format} and dilation {cell.dilation}: LoRA "
                "supports NCHW convolutions without dilation, as PEFT does. Add it to "
                "exclude_modules."
            )
        if getattr(cell.conv2d, "in_strategy", None) is not None:
            raise UnsupportedCellError(
                f"{kind} is sharded, and LoRA on sharded convolutions is not supported. Add it to exclude_modules."
            )

    @classmethod
    def weight_shape(cls, cell: nn.Cell) -> Tuple[int, ...]:
        return tuple(cell.weight.shape)

    @classmethod
    def groups_of(cls, cell: nn.Cell) -> int:
        return cell.group

    def _adopt(self, cell, config):
        self._describe(cell, config)
        self.in_channels, self.out_channels, self.group = cell.in_channels, cell.out_channels, self.groups_of(cell)
        self.kernel_size, self.weight, self.bias, self.conv2d = cell.kernel_size, cell.weight, cell.bias, cell.conv2d
        self._adopt_operators(cell)
        self.dtype = getattr(mstype, config.compute_dtype) if config.compute_dtype else cell.weight.dtype
        shapes = self.part_shapes(cell, self.lora_rank)
        a, b = initial_values(config, shapes["A"], shapes["B"])
        self._add_parts({"A": a, "B": b})
        if self.dropout_rate > 0:
            self.lora_dropout = nn.Dropout(p=self.dropout_rate)
        self.cast = ops.Cast()
        carry_settings(cell, self)

    def _adopt_operators(self, cell):
        self.has_bias, self.bias_add = cell.has_bias, cell.bias_add
        self.lora_a_conv = ops.Conv2D(
            self.lora_rank, cell.kernel_size, pad_mode=cell.pad_mode, pad=cell.padding, stride=cell.stride
        )
        self.lora_b_conv = ops.Conv2D(self.out_channels, 1, group=self.group)

    def construct(self, x: Tensor) -> Tensor:
        input_dtype = x.dtype
        x = self.cast(x, self.dtype)
        y = self._base(x)
        if self.dropout_rate > 0 and self.training:
            x = self.lora_dropout(x)
        low_rank = self._shrink(x, self.cast(self.mindpet_delta_lora_a, self.dtype))
        low_rank = low_rank * self.cast(self.scale, self.dtype)
        y = y + self._expand(low_rank, self.cast(self.mindpet_delta_lora_b, self.dtype))
        return self.cast(y, input_dtype)

    def _base(self, x):
        """conv(x, W) + bias."""
        y = self.conv2d(x, self.cast(self.weight, self.dtype))
        return self.bias_add(y, self.cast(self.bias, self.dtype)) if self.has_bias else y

    def _shrink(self, x, a):
        """conv(x, A)."""
        return self.lora_a_conv(x, a)

    def _expand(self, x, b):
        """conv(x, B)."""
        return self.lora_b_conv(x, b)

    def extend_repr(self) -> str:
        return (
            f"in_channels={self.in_channels}, out_channels={self.out_channels}, kernel_size={self.kernel_size}, "
            f"group={self.group}, lora_rank={self.lora_rank}, lora_alpha={self.lora_alpha}, "
            f"lora_dropout={self.dropout_rate}, compute_dtype={self.dtype}"
        )
