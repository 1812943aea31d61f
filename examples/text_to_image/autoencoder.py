"""A small autoencoder in place of a VAE: patches of pixels to latents and back, fitted to drawings in closed form."""

import mindspore as ms
import numpy as np
from mindspore import nn

PATCH, LATENTS = 3, 12


class Autoencoder(nn.Cell):
    """Principal components of patches: z = E (patch - mean) of variance 1, and back. Nothing of it ever trains.

    Like the VAE of Stable Diffusion, it gives the UNet fewer positions with more channels, and is kept as it is when
    the UNet is fine-tuned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.CellList([nn.Conv2d(3, LATENTS, PATCH, stride=PATCH, pad_mode="valid", has_bias=True)])
        self.decoder = nn.CellList([nn.Conv2d(LATENTS, 3 * PATCH**2, 1, pad_mode="valid", has_bias=True)])

    def fit(self, pictures: np.ndarray) -> None:
        """Sets the weights from pictures, float32 [n, 3, height, width]."""
        n, _, height, width = pictures.shape
        patches = pictures.reshape(n, 3, height // PATCH, PATCH, width // PATCH, PATCH)
        patches = patches.transpose(0, 2, 4, 1, 3, 5).reshape(-1, 3 * PATCH**2).astype(np.float64)
        mean = patches.mean(0)
        variances, directions = np.linalg.eigh(np.cov(patches.T))
        directions, scales = directions[:, ::-1][:, :LATENTS].T, np.sqrt(variances[::-1][:LATENTS])[:, None]
        encode, decode = directions / scales, (directions * scales).T
        _set(self.encoder[0], encode.reshape(LATENTS, 3, PATCH, PATCH), -encode @ mean)
        _set(self.decoder[0], decode[:, :, None, None], mean)

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """Returns latents, float32 [n, LATENTS, height / PATCH, width / PATCH]."""
        return self.encoder[0](ms.Tensor(pictures)).asnumpy()

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Returns pictures, float32 [n, 3, height, width]."""
        patches = self.decoder[0](ms.Tensor(latents)).asnumpy()
        n, _, rows, columns = patches.shape
        patches = patches.reshape(n, 3, PATCH, PATCH, rows, columns).transpose(0, 1, 4, 2, 5, 3)
        return patches.reshape(n, 3, rows * PATCH, columns * PATCH)


def _set(cell, weight, bias) -> None:
    cell.weight.set_data(ms.Tensor(weight.astype(np.float32)))
    cell.bias.set_data(ms.Tensor(bias.astype(np.float32)))
