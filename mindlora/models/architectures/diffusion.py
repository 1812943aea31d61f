"""The paths of the cells of Stable Diffusion 1, 2 and XL, built from the models' structure.

A UNet has two sets of names: those of diffusers (down_blocks.0.attentions.0...), which mindlora uses, and those of the
original code (input_blocks.1.1...), in which most XL adapters in kohya's form are written.
"""

import functools
import re
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

PARTS = ("unet", "text_encoder", "text_encoder_2")

_UNET = re.compile(r"(down_blocks|up_blocks)\.\d+\.|mid_block\.|conv_(in|out)$|(time|add)_embedding\.")
_TEXT_ENCODER = re.compile(r"(text_model\.)?encoder\.layers\.\d+\.(self_attn|mlp)\.|text_projection$")

_TEXT_LAYERS = 32  # XL's second text encoder; the others have fewer.
_TEXT_CELLS = (*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_BLOCK_CELLS = (*(f"attn{n}.{name}" for n in (1, 2) for name in _ATTENTION), "ff.net.0.proj", "ff.net.2")
_RESNET_CELLS = (("conv1", "in_layers.2"), ("conv2", "out_layers.3"), ("time_emb_proj", "emb_layers.1"))
_ENDS = (
    ("conv_in", "input_blocks.0.0"),
    ("conv_out", "out.2"),
    ("time_embedding.linear_1", "time_embed.0"),
    ("time_embedding.linear_2", "time_embed.2"),
)
_XL_ENDS = (("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2"))

# (path in diffusers, path in the original code).
_Pair = Tuple[str, str]


class UNet(NamedTuple):
    """The structure of a UNet: two resnets in each block on the way down, three on the way up.

    Attributes:
        depths (tuple of int): Transformer blocks in each of a block's attentions; 0 for a block without attention.
        middle (int): Transformer blocks in the middle block.
        ends (tuple): The cells outside of all blocks.
    """

    channels: Tuple[int, ...]
    depths: Tuple[int, ...]
    middle: int
    ends: Tuple[_Pair, ...]


# Stable Diffusion 2 has the cells of 1.
SD = UNet((320, 640, 1280, 1280), (1, 1, 1, 0), 1, _ENDS)
SDXL = UNet((320, 640, 1280), (0, 2, 10), 10, _ENDS + _XL_ENDS)


def part_of(path: str) -> Optional[str]:
    """Returns the part of Stable Diffusion to which a path without a leading part name belongs, or None."""
    if _UNET.match(path):
        return "unet"
    return "text_encoder" if _TEXT_ENCODER.match(path) else None


@functools.lru_cache(maxsize=None)
def unet_paths(unet: UNet) -> Dict[str, str]:
    """Returns path in diffusers -> path in the original code, of every linear cell and convolution of a UNet."""
    return dict([*unet.ends, *_down(unet), *_middle(unet), *_up(unet)])


@functools.lru_cache(maxsize=None)
def text_encoder_paths() -> Tuple[str, ...]:
    """Returns the paths of the linear cells of the text encoders (CLIP)."""
    layers = (f"text_model.encoder.layers.{layer}.{cell}" for layer in range(_TEXT_LAYERS) for cell in _TEXT_CELLS)
    return (*layers, "text_projection")


def is_xl(path: str) -> bool:
    """Returns whether XL's UNet has a cell at ``path`` that the UNet of Stable Diffusion 1 and 2 lacks."""
    return path in unet_paths(SDXL) and path not in unet_paths(SD)


@functools.lru_cache(maxsize=None)
def known_paths(part: str) -> Dict[str, str]:
    """Returns, for a part, any known name of a cell -> its path in diffusers."""
    if part != "unet":
        return {path: path for path in text_encoder_paths()}
    pairs = {**unet_paths(SD), **unet_paths(SDXL)}
    original = {old: path for unet in (SD, SDXL) for path, old in unet_paths(unet).items()}
    return {**original, **{path: path for path in pairs}}


def _down(unet: UNet) -> Iterator[_Pair]:
    number = 1
    for block, depth in enumerate(unet.depths):
        for layer in range(2):
            wider = layer == 0 and block > 0 and unet.channels[block] != unet.channels[block - 1]
            yield from _resnet(f"down_blocks.{block}.resnets.{layer}", f"input_blocks.{number}.0", wider)
            yield from _attention(f"down_blocks.{block}.attentions.{layer}", f"input_blocks.{number}.1", depth)
            number += 1
        if block + 1 < len(unet.depths):
            yield f"down_blocks.{block}.downsamplers.0.conv", f"input_blocks.{number}.0.op"
            number += 1


def _middle(unet: UNet) -> Iterator[_Pair]:
    yield from _resnet("mid_block.resnets.0", "middle_block.0", False)
    yield from _attention("mid_block.attentions.0", "middle_block.1", unet.middle)
    yield from _resnet("mid_block.resnets.1", "middle_block.2", False)


def _up(unet: UNet) -> Iterator[_Pair]:
    number = 0
    for block, depth in enumerate(reversed(unet.depths)):
        for layer in range(3):
            # The input is joined with the skip connection, so its channels always differ.
            yield from _resnet(f"up_blocks.{block}.resnets.{layer}", f"output_blocks.{number}.0", True)
            yield from _attention(f"up_blocks.{block}.attentions.{layer}", f"output_blocks.{number}.1", depth)
            number += 1
        if block + 1 < len(unet.depths):
            yield f"up_blocks.{block}.upsamplers.0.conv", f"output_blocks.{number - 1}.{2 if depth else 1}.conv"


def _resnet(path: str, original: str, shortcut: bool) -> Iterator[_Pair]:
    for here, there in (*_RESNET_CELLS, *([("conv_shortcut", "skip_connection")] if shortcut else [])):
        yield f"{path}.{here}", f"{original}.{there}"


def _attention(path: str, original: str, depth: int) -> Iterator[_Pair]:
    blocks = [f"transformer_blocks.{block}.{cell}" for block in range(depth) for cell in _BLOCK_CELLS]
    for cell in ("proj_in", "proj_out", *blocks) if depth else ():
        yield f"{path}.{cell}", f"{original}.{cell}"
