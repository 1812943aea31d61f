"""A small UNet under the module names of diffusers' UNet2DConditionModel, whose LoRA files therefore fit it."""

import math

import mindspore as ms
import numpy as np
from blocks import DownBlock2D, UNetMidBlock2DCrossAttn, UpBlock2D, conv3x3
from mindspore import nn, ops


class TimestepEmbedding(nn.Cell):
    """Two linear cells over the sines and cosines of a time step."""

    def __init__(self, channels: int, time_channels: int) -> None:
        super().__init__()
        self.linear_1 = nn.Dense(channels, time_channels)
        self.act = nn.SiLU()
        self.linear_2 = nn.Dense(time_channels, time_channels)
        half = channels // 2
        self.frequencies = ms.Tensor(np.exp(-math.log(10000) * np.arange(half) / half), ms.float32)

    def construct(self, time: ms.Tensor) -> ms.Tensor:
        angles = time.astype(ms.float32).reshape((-1, 1)) * self.frequencies
        return self.linear_2(self.act(self.linear_1(ops.concat((ops.cos(angles), ops.sin(angles)), -1))))


class UNet(nn.Cell):
    """Predicts what a noisy picture was made of, from the picture, the time step and the caption.

    Two sizes: pixels of ``channels`` features, with attention, and half the height and width with twice as many.

    Args:
        channels (int): Features of a pixel, a multiple of ``heads`` and ``groups``. Default: 32.
        context_channels (int): Width of the caption's features. Default: 32.
        heads (int): Heads of each attention. Default: 4.
        groups (int): Groups of each GroupNorm. Default: 8.
        picture_channels (int): Channels of a picture. Default: 3.

    Inputs:
        - **picture** (Tensor) - Shape [n, picture_channels, height, width], both sizes even.
        - **time** (Tensor) - The time step, shape [n].
        - **words** (Tensor) - The caption's features, shape [n, words, context_channels].

    Outputs:
        Tensor of the shape of ``picture``.
    """

    def __init__(
        self, channels: int = 32, context_channels: int = 32, heads: int = 4, groups: int = 8, picture_channels: int = 3
    ) -> None:
        super().__init__()
        small, large, time, context = channels, 2 * channels, 4 * channels, (context_channels, heads)
        self.conv_in = conv3x3(picture_channels, small)
        self.time_embedding = TimestepEmbedding(small, time)
        self.down_blocks = nn.CellList(
            [
                DownBlock2D(small, small, time, groups, context, halves=True),
                DownBlock2D(small, large, time, groups, None, halves=False),
            ]
        )
        self.mid_block = UNetMidBlock2DCrossAttn(large, time, groups, context)
        self.up_blocks = nn.CellList(
            [
                UpBlock2D(large, (large, small), large, time, groups, None, doubles=True),
                UpBlock2D(large, (small, small), small, time, groups, context, doubles=False),
            ]
        )
        self.conv_norm_out = nn.GroupNorm(groups, small, eps=1e-5)
        self.conv_act = nn.SiLU()
        self.conv_out = conv3x3(small, picture_channels)

    def construct(self, picture: ms.Tensor, time: ms.Tensor, words: ms.Tensor) -> ms.Tensor:
        time = self.time_embedding(time)
        first = self.conv_in(picture)
        x, (second, third) = self.down_blocks[0](first, time, words)
        x, (fourth,) = self.down_blocks[1](x, time, words)
        x = self.mid_block(x, time, words)
        x = self.up_blocks[0](x, (fourth, third), time, words)
        x = self.up_blocks[1](x, (second, first), time, words)
        return self.conv_out(self.conv_act(self.conv_norm_out(x)))
