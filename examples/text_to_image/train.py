"""Text-to-image LoRA from end to end: a small base learns to draw shapes, LoRA teaches it a style, pictures show it.

Run it with ``python examples/text_to_image/train.py``. It needs MindSpore and Pillow, but no MindFormers and no NPU; it
draws its own data and downloads nothing.
"""

import argparse
import os

# On some CPUs, MindSpore 2.9 convolves a hundred times faster with AVX2 than with AVX-512.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import drawings  # noqa: E402
import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from diffusion import DenoisingLoss, Pipeline, batch, sample  # noqa: E402
from mindspore import nn  # noqa: E402

import mindlora  # noqa: E402

# With all of a pipeline in one cell, the targets say that they mean the UNet: the text encoder and the VAE stay frozen.
TARGETS = r"unet\..*(to_q|to_k|to_v|to_out\.0|conv1|conv2|proj_in|proj_out|conv_in|conv_out)"


def main() -> None:
    """Trains or loads the base, fine-tunes LoRA, saves pictures and the adapter, and loads the adapter again."""
    settings = arguments()
    ms.set_context(mode=ms.PYNATIVE_MODE if settings.pynative else ms.GRAPH_MODE)
    ms.set_seed(settings.seed)
    os.makedirs(settings.output, exist_ok=True)
    base = settings.base or os.path.join(settings.output, "base.ckpt")
    if not os.path.exists(base):
        make_base(settings, base)
    pipeline = load_base(base)
    captions = drawings.captions(drawings.NIGHT_STYLE)
    before = draw(pipeline, captions, settings, "before.png")

    mindlora.apply_lora(pipeline, mindlora.LoraConfig(lora_rank=8, lora_alpha=16, target_modules=TARGETS))
    mindlora.freeze_base(pipeline)
    print(mindlora.trainable_summary(pipeline).splitlines()[-1])
    train(pipeline, captions, settings.steps, 4e-3, settings)
    after = draw(pipeline, captions, settings, "after.png")
    print(f"brightness of the background: {background(before):.2f} before, {background(after):.2f} after")

    adapter = os.path.join(settings.output, "adapter")
    mindlora.save_lora(pipeline, adapter, format="diffusers")
    fresh = load_base(base)
    mindlora.load_lora(fresh, adapter)
    again = draw(fresh, captions, settings, "loaded.png")
    print(f"largest difference of the pictures after loading: {np.abs(again - after).max():.1e}")


def make_base(settings: argparse.Namespace, path: str) -> None:
    """Fits the autoencoder, trains UNet and text encoder on plain drawings, and saves them all."""
    pipeline = Pipeline()
    pictures, _ = drawings.drawn_set(drawings.captions(), 240, np.random.default_rng(settings.seed))
    pipeline.vae.fit(pictures)
    for parameter in pipeline.vae.get_parameters():
        parameter.requires_grad = False
    train(pipeline, drawings.captions(), settings.base_steps, 2e-3, settings)
    ms.save_checkpoint(pipeline, path)
    draw(pipeline, drawings.captions(), settings, "base.png")


def load_base(path: str) -> Pipeline:
    """Returns the networks with the weights of a base."""
    pipeline = Pipeline()
    ms.load_checkpoint(path, pipeline, strict_load=True)
    return pipeline


def train(pipeline: Pipeline, captions: list, steps: int, rate: float, settings: argparse.Namespace) -> None:
    """Trains the parameters of ``pipeline`` that are not frozen on drawings of ``captions``, and prints the losses."""
    rng = np.random.default_rng(settings.seed + 1)
    pictures, tokens = drawings.drawn_set(captions, settings.drawings, rng)
    latents = pipeline.vae.encode(pictures)
    rates = nn.cosine_decay_lr(rate / 100, rate, steps, steps, 1)
    optimizer = nn.Adam(pipeline.trainable_params(), rates)
    step, losses = nn.TrainOneStepCell(DenoisingLoss(pipeline), optimizer).set_train(), []
    for index in range(steps):
        inputs = batch(latents, tokens, settings.batch_size, settings.min_snr_gamma, rng)
        losses.append(float(step(*inputs).asnumpy()))
        if index % 50 == 49 or index == steps - 1:
            print(f"step {index + 1} of {steps}: loss {np.mean(losses[-50:]):.3f}", flush=True)
    pipeline.set_train(False)


def draw(pipeline: Pipeline, captions: list, settings: argparse.Namespace, name: str) -> np.ndarray:
    """Samples a picture for each caption, from the same noise each time, and writes them as a PNG."""
    pictures = sample(pipeline, captions, settings.sampling_steps, seed=settings.seed)
    path = os.path.join(settings.output, name)
    drawings.save_grid(pictures, len(drawings.SHAPES), path)
    print(f"pictures: {path}")
    return pictures


def background(pictures: np.ndarray) -> float:
    """Returns the mean brightness, 0 to 1, of the pixels at the border."""
    inside = np.zeros(pictures.shape[-2:], bool)
    inside[2:-2, 2:-2] = True
    return float((pictures[:, :, ~inside].mean() + 1) / 2)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="text_to_image_output", help="folder for pictures, base and adapter")
    parser.add_argument("--base", help="a base from an earlier run (base.ckpt); default: make one")
    parser.add_argument("--base-steps", type=int, default=400, help="steps that the base trains, if it is made")
    parser.add_argument("--steps", type=int, default=150, help="steps that LoRA trains")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--drawings", type=int, default=240, help="drawings to train on")
    parser.add_argument("--sampling-steps", type=int, default=20)
    parser.add_argument("--min-snr-gamma", type=float, help="weight the loss by min-SNR with this gamma, such as 5")
    parser.add_argument("--pynative", action="store_true", help="PyNative in place of graph mode")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    for name, value in vars(settings).items():
        if isinstance(value, (int, float)) and name not in ("seed", "pynative") and not value > 0:
            parser.error(f"--{name.replace('_', '-')} is {value}: it must be above 0.")
    if settings.base and not os.path.exists(settings.base):
        parser.error(f"--base: {settings.base} does not exist.")
    return settings


if __name__ == "__main__":
    main()
