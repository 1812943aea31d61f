"""The names of Stable Diffusion's cells: made by rule, as many as the models have, and none flattened to another's."""

import collections

import pytest

from mindlora.models.architectures import diffusion


@pytest.mark.parametrize(
    "unet, cells, blocks", [(diffusion.SD, 282, 16), (diffusion.SDXL, 794, 70)], ids=["1 and 2", "XL"]
)
def test_a_unet_has_the_cells_that_diffusers_counts(unet, cells, blocks):
    paths = diffusion.unet_paths(unet)
    assert len(paths) == len(set(paths.values())) == cells
    assert sum(path.endswith("attn1.to_q") for path in paths) == blocks
    assert all(diffusion.part_of(path) == "unet" for path in paths)


@pytest.mark.parametrize(
    "path, original",
    [
        ("conv_out", "out.2"),
        ("down_blocks.1.resnets.0.conv_shortcut", "input_blocks.4.0.skip_connection"),
        (
            "down_blocks.2.attentions.1.transformer_blocks.0.ff.net.0.proj",
            "input_blocks.8.1.transformer_blocks.0.ff.net.0.proj",
        ),
        ("down_blocks.0.downsamplers.0.conv", "input_blocks.3.0.op"),
        ("mid_block.resnets.1.time_emb_proj", "middle_block.2.emb_layers.1"),
        ("up_blocks.0.upsamplers.0.conv", "output_blocks.2.1.conv"),
        ("up_blocks.1.upsamplers.0.conv", "output_blocks.5.2.conv"),
        ("up_blocks.3.attentions.2.proj_in", "output_blocks.11.1.proj_in"),
    ],
)
def test_the_original_names_of_stable_diffusion_1(path, original):
    assert diffusion.unet_paths(diffusion.SD)[path] == original
    assert diffusion.known_paths("unet")[original] == path


def test_no_two_cells_flatten_to_one_name():
    for part in diffusion.PARTS:
        found = collections.defaultdict(set)
        for name, path in diffusion.known_paths(part).items():
            found[name.replace(".", "_")].add(path)
        assert len(found) > 100 and all(len(paths) == 1 for paths in found.values())


def test_what_only_xl_has():
    assert diffusion.is_xl("add_embedding.linear_1")
    assert diffusion.is_xl("mid_block.attentions.0.transformer_blocks.9.attn1.to_q")
    assert not diffusion.is_xl("conv_in") and not diffusion.is_xl("down_blocks.9.conv")


@pytest.mark.parametrize(
    "path, part",
    [
        ("text_model.encoder.layers.3.mlp.fc1", "text_encoder"),
        ("encoder.layers.3.self_attn.q_proj", "text_encoder"),
        ("text_projection", "text_encoder"),
        ("model.layers.0.attention.wq", None),
        ("encoder.down_blocks.0.resnets.0.conv1", None),  # the VAE
    ],
)
def test_the_part_of_a_path(path, part):
    assert diffusion.part_of(path) == part
