"""The blocks of a UNet: residual blocks with a time embedding, and the way down, through the middle, and up."""

from typing import List, Optional, Tuple

import mindspore as ms
from attention_blocks import Transformer2DModel
from mindspore import nn, ops


def conv3x3(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """Returns a 3 x 3 convolution with a bias and a border of one."""
    return nn.Conv2d(channels, out_channels, 3, stride=stride, pad_mode="pad", padding=1, has_bias=True)


class ResnetBlock2D(nn.Cell):
    """Two convolutions, each after GroupNorm and SiLU, with the time added between them, added to the input."""

    def __init__(self, channels: int, out_channels: int, time_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, eps=1e-5)
        self.conv1 = conv3x3(channels, out_channels)
        self.time_emb_proj = nn.Dense(time_channels, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps=1e-5)
        self.conv2 = conv3x3(out_channels, out_channels)
        self.nonlinearity = nn.SiLU()
        self.shortcuts = channels != out_channels
        if self.shortcuts:
            self.conv_shortcut = nn.Conv2d(channels, out_channels, 1, has_bias=True)

    def construct(self, x: ms.Tensor, time: ms.Tensor) -> ms.Tensor:
        y = self.conv1(self.nonlinearity(self.norm1(x)))
        time = self.time_emb_proj(self.nonlinearity(time))
        y = y + time.reshape((time.shape[0], time.shape[1], 1, 1))
        y = self.conv2(self.nonlinearity(self.norm2(y)))
        return y + (self.conv_shortcut(x) if self.shortcuts else x)


class Downsample2D(nn.Cell):
    """Halves height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv3x3(channels, channels, stride=2)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.conv(x)


class Upsample2D(nn.Cell):
    """Doubles height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv3x3(channels, channels)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.conv(ops.interpolate(x, size=(2 * x.shape[2], 2 * x.shape[3]), mode="nearest"))


def transformers(count: int, channels: int, context: Optional[Tuple[int, int]], groups: int) -> List[nn.Cell]:
    """Returns ``count`` transformers, or none if ``context``, (width of the caption's features, heads), is None."""
    if context is None:
        return []
    return [Transformer2DModel(channels, *context, groups) for _ in range(count)]


class DownBlock2D(nn.Cell):
    """One residual block, with attention where ``context`` is given, and then half the size where ``halves``."""

    def __init__(self, channels, out_channels, time_channels, groups, context, halves) -> None:
        super().__init__()
        self.resnets = nn.CellList([ResnetBlock2D(channels, out_channels, time_channels, groups)])
        self.attends, self.halves = context is not None, halves
        if self.attends:
            self.attentions = nn.CellList(transformers(1, out_channels, context, groups))
        if halves:
            self.downsamplers = nn.CellList([Downsample2D(out_channels)])

    def construct(self, x: ms.Tensor, time: ms.Tensor, words: ms.Tensor) -> Tuple[ms.Tensor, Tuple[ms.Tensor, ...]]:
        x = self.resnets[0](x, time)
        if self.attends:
            x = self.attentions[0](x, words)
        if not self.halves:
            return x, (x,)
        y = self.downsamplers[0](x)
        return y, (x, y)


class UNetMidBlock2DCrossAttn(nn.Cell):
    """Attention between two residual blocks."""

    def __init__(self, channels, time_channels, groups, context) -> None:
        super().__init__()
        self.attentions = nn.CellList(transformers(1, channels, context, groups))
        self.resnets = nn.CellList([ResnetBlock2D(channels, channels, time_channels, groups) for _ in range(2)])

    def construct(self, x: ms.Tensor, time: ms.Tensor, words: ms.Tensor) -> ms.Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x, time), words), time)


class UpBlock2D(nn.Cell):
    """Two residual blocks, each joined with what came by on the way down; then double the size where ``doubles``."""

    def __init__(self, channels, skips, out_channels, time_channels, groups, context, doubles) -> None:
        super().__init__()
        inputs = [channels + skips[0], out_channels + skips[1]]
        self.resnets = nn.CellList([ResnetBlock2D(size, out_channels, time_channels, groups) for size in inputs])
        self.attends, self.doubles = context is not None, doubles
        if self.attends:
            self.attentions = nn.CellList(transformers(2, out_channels, context, groups))
        if doubles:
            self.upsamplers = nn.CellList([Upsample2D(out_channels)])

    def construct(self, x: ms.Tensor, skips: Tuple[ms.Tensor, ...], time: ms.Tensor, words: ms.Tensor) -> ms.Tensor:
        for index in range(2):
            x = self.resnets[index](ops.concat((x, skips[index]), 1), time)
            if self.attends:
                x = self.attentions[index](x, words)
        return self.upsamplers[0](x) if self.doubles else x
