"""Noise, the loss of a denoiser with its weights over the time steps, and sampling."""

from typing import Optional, Sequence

import drawings
import mindspore as ms
import numpy as np
from autoencoder import LATENTS, PATCH, Autoencoder
from mindspore import nn
from text_encoder import TextEncoder
from unet import UNet

TIMES = 1000


class Pipeline(nn.Cell):
    """What a picture takes, in one cell, under the names of diffusers' pipelines: unet, text_encoder, vae."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = TextEncoder(len(drawings.WORDS), drawings.CAPTION_LENGTH)
        self.vae = Autoencoder()
        self.unet = UNet(picture_channels=LATENTS)

    def construct(self, latents: ms.Tensor, time: ms.Tensor, tokens: ms.Tensor) -> ms.Tensor:
        return self.unet(latents, time, self.text_encoder(tokens))


def signal_and_noise(time: np.ndarray) -> np.ndarray:
    """Returns (alpha, sigma), float32 [2, n]: how much of latents and of noise is left at time steps, int [n].

    The cosine schedule (Nichol and Dhariwal, Improved Denoising Diffusion Probabilistic Models, 2021).
    """
    angle = (time + 0.5) / TIMES * (np.pi / 2) * 0.99
    return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)


def loss_weights(time: np.ndarray, gamma: Optional[float]) -> np.ndarray:
    """Returns the weight of each time step's loss: 1, or with ``gamma`` min(SNR, gamma) / (SNR + 1).

    SNR is alpha^2 / sigma^2, and the divisor is the one for a network that predicts v.

    Source: Hang et al., Efficient Diffusion Training via Min-SNR Weighting Strategy, 2023.
    """
    alpha, sigma = signal_and_noise(time)
    ratio = (alpha / sigma) ** 2
    return np.ones_like(ratio) if gamma is None else np.minimum(ratio, gamma) / (ratio + 1)


class DenoisingLoss(nn.Cell):
    """mean(weight |v' - v|^2), v = alpha noise - sigma latents (Salimans and Ho, Progressive Distillation, 2022)."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(auto_prefix=False)
        self.pipeline = pipeline

    def construct(
        self, latents: ms.Tensor, noise: ms.Tensor, levels: ms.Tensor, time: ms.Tensor, tokens: ms.Tensor
    ) -> ms.Tensor:
        alpha, sigma, weight = (level.reshape((-1, 1, 1, 1)) for level in (levels[0], levels[1], levels[2]))
        v = self.pipeline(alpha * latents + sigma * noise, time, tokens)
        return (weight * (v - (alpha * noise - sigma * latents)) ** 2).mean()


def batch(latents: np.ndarray, tokens: np.ndarray, size: int, gamma: Optional[float], rng: np.random.Generator) -> list:
    """Returns the inputs of DenoisingLoss for latents drawn at random; every tenth caption is left empty."""
    chosen = rng.integers(0, len(latents), size)
    time = rng.integers(0, TIMES, size)
    levels = np.concatenate([signal_and_noise(time), loss_weights(time, gamma)[None]]).astype(np.float32)
    told = rng.random((size, 1)) >= 0.1
    noise = rng.standard_normal(latents[chosen].shape).astype(np.float32)
    arrays = latents[chosen], noise, levels, time.astype(np.int32), (tokens[chosen] * told).astype(np.int32)
    return [ms.Tensor(array) for array in arrays]


def sample(
    pipeline: Pipeline, captions: Sequence[str], steps: int = 20, guidance: float = 3.0, seed: int = 0
) -> np.ndarray:
    """Draws a picture for each caption, from noise, by DDIM with classifier-free guidance.

    Args:
        pipeline (Pipeline): The networks.
        captions (sequence of str): What to draw.
        steps (int): How often the UNet is asked. Default: 20.
        guidance (float): How far to go from what is drawn for an empty caption to what is for this one. Default: 3.0.
        seed (int): Seed of the noise. Default: 0.

    Returns:
        numpy.ndarray, float32 [n, 3, height, width], from -1 to 1.

    Source: Song et al., Denoising Diffusion Implicit Models, 2021; Ho and Salimans, Classifier-Free Diffusion Guidance,
        2022.
    """
    pipeline.set_train(False)
    n, side = len(captions), drawings.SIZE // PATCH
    tokens = ms.Tensor(drawings.tokens([*captions, *([""] * n)]))
    latents = np.random.default_rng(seed).standard_normal((n, LATENTS, side, side)).astype(np.float32)
    times = np.linspace(TIMES - 1, 0, steps).round().astype(np.int32)
    for now, following in zip(times, [*times[1:], None]):
        alpha, sigma = signal_and_noise(now)
        both = ms.Tensor(np.concatenate([latents, latents]))
        v, plain = np.split(pipeline(both, ms.Tensor(np.full(2 * n, now, np.int32)), tokens).asnumpy(), 2)
        v = plain + np.float32(guidance) * (v - plain)
        clean, noise = alpha * latents - sigma * v, sigma * latents + alpha * v
        alpha, sigma = (1.0, 0.0) if following is None else signal_and_noise(following)
        latents = (alpha * clean + sigma * noise).astype(np.float32)
    return np.clip(pipeline.vae.decode(latents), -1, 1)
