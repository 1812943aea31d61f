"""Which cells of a text-to-image pipeline may be adapted: the UNet's, the text encoder's if asked for, no others."""

import pytest

from mindlora.core.errors import TargetError
from mindlora.models.trainable import check_parts

UNET, VAE, TEXT = "unet.mid_block.attn.to_q", "vae.encoder.mid_block.to_q", "text_encoder.layers.0.q_proj"
SECOND_TEXT = "text_encoder_2.layers.0.q_proj"
ALL = [UNET, VAE, TEXT, SECOND_TEXT]


@pytest.mark.parametrize(
    "paths, patterns, every",
    [
        ([UNET], ["to_q"], ALL),
        ([UNET, TEXT, SECOND_TEXT], r"unet\..*to_q|text_encoder.*q_proj", ALL),
        ([UNET, TEXT], [UNET, TEXT], ALL),
        ([VAE], ["to_q"], [VAE, TEXT]),  # Without a denoiser beside it, a VAE is a network like any other.
        (["decoder.vae.to_q"], ["to_q"], ["decoder.vae.to_q", UNET]),
        (["model.transformer.h.0.wq"], ["wq"], ["model.transformer.h.0.wq", "model.lm_head"]),
    ],
)
def test_what_is_allowed(paths, patterns, every):
    check_parts(paths, every, patterns, "target_modules")


@pytest.mark.parametrize("around", ["", "network.pipeline."])
@pytest.mark.parametrize("denoiser", ["unet", "transformer"])
@pytest.mark.parametrize("part", ["vae", "safety_checker", "image_encoder"])
def test_parts_that_are_never_adapted(part, denoiser, around):
    every = [f"{around}{denoiser}.to_q", f"{around}{part}.0.to_q", f"{around}{part}.1.to_q"]
    for patterns in (["to_q"], f".*{part}.*"):
        with pytest.raises(TargetError) as error:
            check_parts(every[1:], every, patterns, "target_modules")
        assert str(error.value) == (
            f"target_modules {patterns!r} selects cells of {around}{part}, which fine-tuning {around}{denoiser} leaves "
            f"as it is: {around}{part}.{{0..1}}.to_q. Begin the patterns with the part that they are for, such as "
            f"{around}{denoiser}."
        )


def test_the_text_encoder_is_adapted_only_if_it_is_named():
    for path in (TEXT, SECOND_TEXT):
        with pytest.raises(TargetError, match=f"{path.split('.')[0]}, which .* or name text_encoder in them to train"):
            check_parts([UNET, path], ALL, "all-linear", "target_modules")
    with pytest.raises(TargetError, match="cells of vae"):
        check_parts([TEXT, VAE], ALL, ["text_encoder.layers.0.q_proj", "to_q"], "target_modules")
