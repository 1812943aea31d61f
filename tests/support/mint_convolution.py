"""Stand-ins for the convolutions of mindspore.mint, which have no kernel on a CPU: the same sums by ops.Conv2D.

A test that builds a mint.nn.Conv2d calls ``stand_in`` first.
"""

from mindspore import ops
from mindspore.mint.nn.layer import conv


def stand_in(monkeypatch) -> None:
    """Gives every mint.nn.Conv2d that is made from now on operators that a CPU has."""
    monkeypatch.setattr(conv, "conv2d_ext_op", convolution)
    monkeypatch.setattr(conv, "conv2d_padding_op", convolution)


def convolution(x, weight, bias, stride, padding, dilation, groups):
    """conv(x, weight) + bias, with a padding in words or as (rows, columns)."""
    words = isinstance(padding, str)
    y = ops.Conv2D(
        weight.shape[0],
        weight.shape[2:],
        pad_mode=padding if words else "pad",
        pad=0 if words else (padding[0], padding[0], padding[1], padding[1]),
        stride=stride,
        dilation=dilation,
        group=groups,
    )(x, weight)
    return y if bias is None else y + bias.reshape((1, -1, 1, 1))
