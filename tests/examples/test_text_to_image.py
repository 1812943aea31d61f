"""examples/text_to_image trains, draws, saves and loads, with settings far too small to learn anything."""

import os
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import ROOT
from tests.support import forked
from tests.support.small_unet import FOLDER  # noqa: F401  (makes the example's modules importable)


def test_the_program_runs_from_end_to_end(tmp_path):
    small = {"base-steps": 1, "steps": 2, "batch-size": 2, "drawings": 12, "sampling-steps": 1, "min-snr-gamma": 5}
    options = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    program = os.path.join(ROOT, "examples", "text_to_image", "train.py")
    result = forked.run([program, "--pynative", *options], tmp_path, {**os.environ, "PYTHONPATH": ROOT}, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "trainable params: 106,688 || all params: 918,171" in result.stdout
    assert float(re.search(r"pictures after loading: (\S+)", result.stdout)[1]) == 0
    files = {"base.ckpt", "base.png", "before.png", "after.png", "loaded.png", "adapter"}
    assert set(os.listdir(tmp_path / "text_to_image_output")) == files
    adapter = load_file(tmp_path / "text_to_image_output" / "adapter" / "pytorch_lora_weights.safetensors")
    assert adapter["unet.down_blocks.0.attentions.0.proj_in.lora_A.weight"].shape == (8, 32, 1, 1)
    assert all(key.startswith("unet.") for key in adapter)


def test_the_same_drawing_on_paper_and_by_night():
    import drawings

    day, night = (drawings.draw(f"a red circle{style}", np.random.default_rng(0)) for style in ("", " night"))
    assert day.shape == (3, drawings.SIZE, drawings.SIZE) and day[:, 0, 0].min() > 0.8 > -0.5 > night[:, 0, 0].max()
    middle = np.array(drawings.COLOURS["red"]) / 127.5 - 1
    for picture in (day, night):
        np.testing.assert_allclose(picture[:, 12, 12], middle, atol=1e-6)
    assert drawings.tokens(["a red circle night", ""]).tolist() == [[1, 3, 7, 2], [0, 0, 0, 0]]
    assert len(drawings.captions()) == 12


def test_latents_have_unit_variance_and_come_back_as_pictures():
    import drawings
    from autoencoder import Autoencoder

    pictures, _ = drawings.drawn_set(drawings.captions(), 60, np.random.default_rng(0))
    vae = Autoencoder()
    vae.fit(pictures)
    latents = vae.encode(pictures)
    np.testing.assert_allclose(latents.std((0, 2, 3)), 1, atol=1e-3)
    assert np.abs(vae.decode(latents) - pictures).mean() < 0.05


@pytest.mark.parametrize("gamma", [None, 5.0])
def test_noise_levels_and_min_snr_weights(gamma):
    from diffusion import TIMES, loss_weights, signal_and_noise

    time = np.array([0, 300, TIMES - 1])
    alpha, sigma = signal_and_noise(time).astype(np.float64)
    np.testing.assert_allclose(alpha**2 + sigma**2, 1, atol=1e-6)
    assert (np.diff(alpha) < 0).all() and alpha[0] > 0.999 and alpha[-1] < 0.02
    weights = loss_weights(time, gamma)
    if gamma is None:
        assert (weights == 1).all()
    else:
        ratio = (alpha / sigma) ** 2
        np.testing.assert_allclose(weights, np.minimum(ratio, gamma) / (ratio + 1), rtol=1e-4)
