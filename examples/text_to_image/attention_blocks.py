"""The parts of a UNet that read the caption: attention, feed-forward, and the transformer around them."""

import mindspore as ms
from mindspore import nn, ops


class Attention(nn.Cell):
    """Attention of pixels to pixels, or of pixels to the words of a caption.

    Args:
        channels (int): Width of the pixels' features.
        context_channels (int): Width of what they attend to.
        heads (int): Number of heads, a divisor of ``channels``.
    """

    def __init__(self, channels: int, context_channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, channels // heads
        self.to_q = nn.Dense(channels, channels, has_bias=False)
        self.to_k = nn.Dense(context_channels, channels, has_bias=False)
        self.to_v = nn.Dense(context_channels, channels, has_bias=False)
        self.to_out = nn.CellList([nn.Dense(channels, channels)])
        self.softmax = nn.Softmax(axis=-1)
        self.scores, self.mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()

    def construct(self, x: ms.Tensor, context: ms.Tensor) -> ms.Tensor:
        q = self._split(self.to_q(x)) * self.head_size**-0.5
        weights = self.softmax(self.scores(q, self._split(self.to_k(context))))
        y = self.mix(weights, self._split(self.to_v(context)))
        return self.to_out[0](y.transpose((0, 2, 1, 3)).reshape(x.shape))

    def _split(self, x):
        return x.reshape((x.shape[0], x.shape[1], self.heads, self.head_size)).transpose((0, 2, 1, 3))


class GEGLU(nn.Cell):
    """y = a * gelu(b), a and b being the halves of a projection (Shazeer, GLU Variants Improve Transformer, 2020)."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.proj = nn.Dense(channels, 2 * hidden)
        self.gelu = nn.GELU(approximate=False)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        y = self.proj(x)
        return y[..., : self.hidden] * self.gelu(y[..., self.hidden :])


class FeedForward(nn.Cell):
    """Two linear cells around a GEGLU; net.1 is where diffusers has a Dropout."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.CellList([GEGLU(channels, 4 * channels), nn.Identity(), nn.Dense(4 * channels, channels)])

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.net[2](self.net[0](x))


class BasicTransformerBlock(nn.Cell):
    """Self-attention, attention to the caption, feed-forward; each after a LayerNorm and added to its input."""

    def __init__(self, channels: int, context_channels: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm((channels,), epsilon=1e-5)
        self.attn1 = Attention(channels, channels, heads)
        self.norm2 = nn.LayerNorm((channels,), epsilon=1e-5)
        self.attn2 = Attention(channels, context_channels, heads)
        self.norm3 = nn.LayerNorm((channels,), epsilon=1e-5)
        self.ff = FeedForward(channels)

    def construct(self, x: ms.Tensor, context: ms.Tensor) -> ms.Tensor:
        y = self.norm1(x)
        x = x + self.attn1(y, y)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(self.norm3(x))


class Transformer2DModel(nn.Cell):
    """A transformer over the pixels of a feature map, between two 1 x 1 convolutions, added to its input."""

    def __init__(self, channels: int, context_channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.proj_in = nn.Conv2d(channels, channels, 1, has_bias=True)
        self.transformer_blocks = nn.CellList([BasicTransformerBlock(channels, context_channels, heads)])
        self.proj_out = nn.Conv2d(channels, channels, 1, has_bias=True)

    def construct(self, x: ms.Tensor, context: ms.Tensor) -> ms.Tensor:
        n, channels, height, width = x.shape
        y = self.proj_in(self.norm(x)).transpose((0, 2, 3, 1)).reshape((n, height * width, channels))
        for block in self.transformer_blocks:
            y = block(y, context)
        y = y.reshape((n, height, width, channels)).transpose((0, 3, 1, 2))
        return self.proj_out(y) + x
