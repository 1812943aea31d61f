"""The small UNet of examples/text_to_image, smaller still, with inputs for it."""

import os
import sys

import numpy as np
from mindspore import Tensor, nn

from tests.conftest import ROOT

FOLDER = os.path.join(ROOT, "examples", "text_to_image")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

from blocks import ResnetBlock2D  # noqa: E402, F401
from norm_recompute import NormActivation, recompute_norm_activation  # noqa: E402, F401
from unet import UNet  # noqa: E402

CONTEXT = 6


def small_unet(seed=1):
    """Returns a UNet of 8 channels with normal weights."""
    network, rng = UNet(channels=8, context_channels=CONTEXT, heads=2, groups=4), np.random.default_rng(seed)
    for parameter in network.get_parameters():
        mean = 1 if parameter.name.endswith("gamma") else 0
        parameter.set_data(Tensor((mean + 0.2 * rng.normal(size=parameter.shape)).astype(np.float32)))
    return network


def unet_inputs(seed=0, batch=1):
    """Returns a picture, its time step and a caption's features."""
    rng = np.random.default_rng(seed)
    return (
        Tensor(rng.normal(size=(batch, 3, 8, 8)).astype(np.float32)),
        Tensor(rng.integers(0, 1000, batch).astype(np.int32)),
        Tensor(rng.normal(size=(batch, 3, CONTEXT)).astype(np.float32)),
    )


class MeanSquare(nn.Cell):
    """mean(unet(x, time, words)^2)."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, picture, time, words):
        return (self.network(picture, time, words) ** 2).mean()
