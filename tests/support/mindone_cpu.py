"""Stand-ins for kernels that a CPU lacks, so that mindone's UNet2DConditionModel runs there in graph mode.

They take the place of functions of mindspore.mint while a test runs; mindone's own code is not changed.
"""

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from tests.support import mint_convolution


def stand_in(monkeypatch, activations) -> None:
    """Gives the models of mindone that are made from now on operators that a CPU has in graph mode.

    Args:
        monkeypatch: pytest's.
        activations (module): mindone.diffusers.models.activations.
    """
    mint_convolution.stand_in(monkeypatch)
    monkeypatch.setattr(mint.nn, "LayerNorm", LayerNorm)
    monkeypatch.setattr(mint.nn, "Dropout", NoDropout)
    monkeypatch.setattr(mint.nn.functional, "gelu", gelu)
    monkeypatch.setattr(mint, "split", halves)
    monkeypatch.setattr(activations.GEGLU, "construct", geglu)


class LayerNorm(nn.Cell):
    """mint.nn.LayerNorm over the last axis."""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, dtype=None):
        super().__init__()
        size = normalized_shape if isinstance(normalized_shape, int) else normalized_shape[0]
        self.weight = Parameter(Tensor(np.ones(size, np.float32)), name="weight")
        self.bias = Parameter(Tensor(np.zeros(size, np.float32)), name="bias")
        self.layer_norm = ops.LayerNorm(-1, -1, eps)

    def construct(self, x):
        return self.layer_norm(x, self.weight, self.bias)[0]


class NoDropout(nn.Cell):
    """mint.nn.Dropout with p = 0, which is all that the test asks for."""

    def __init__(self, p=0.5, inplace=False):
        super().__init__()
        assert p == 0

    def construct(self, x):
        return x


def gelu(x, *, approximate="none"):
    """gelu(x), exact."""
    return 0.5 * x * (1 + ops.erf(x * 0.7071067811865476))


def halves(x, sizes, dim):
    """mint.split of two columns of equal width."""
    return x[:, : sizes[0]], x[:, sizes[0] :]


def geglu(self, hidden_states):
    """GEGLU's forward with slices in place of chunk."""
    y = self.proj(hidden_states)
    half = y.shape[-1] // 2
    return y[..., :half] * self.gelu(y[..., half:])
