"""kohya's form: bit-equal both ways, names that find their paths, alphas, three matrices, what is refused by name."""

import numpy as np
import pytest
from safetensors import safe_open

from mindlora.core.errors import (
    AdapterError,
    AdapterFormatError,
    MissingTensorsError,
    ShapeMismatchError,
    UnexpectedTensorsError,
)
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.parts import Wanted
from tests.support.diffusion_adapters import ATTENTION, CONV, TEXT, Q, assert_same_pairs, make, pair, saved

FLAT = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


def written(tmp_path, adapter):
    path = str(tmp_path / "adapter.safetensors")
    adapter_files.write(adapter, path, "kohya")
    return path


def keys(path):
    with safe_open(path, framework="np") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def linear(name, rank=2, alpha=None):
    """The tensors of a linear cell."""
    a, b = pair(np.random.default_rng(1), rank, (6,), 5)
    alphas = {} if alpha is None else {f"{name}.alpha": np.array(alpha)}
    return {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, **alphas}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ranks_and_alphas_of_each_cell_come_back(tmp_path, dtype):
    adapter = make(dtype=dtype)
    path = written(tmp_path, adapter)
    assert_same_pairs(adapter_files.read(path), adapter)
    stored = keys(path)
    assert len(stored) == 3 * len(adapter.paths) and stored[f"{FLAT}.alpha"].shape == ()
    assert stored[f"{FLAT}.alpha"].dtype == dtype and stored[f"{FLAT}.alpha"] == 8
    assert "lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_up.weight" in stored


@pytest.mark.parametrize("alpha, kept", [(1 / 3, "float64"), (0.1, "float64"), (1e5, "float32"), (0.5, "float16")])
def test_an_alpha_is_as_wide_as_it_must_be(tmp_path, alpha, kept):
    adapter = make((Q,), dtype=np.float16)
    adapter.alphas[Q] = alpha
    path = written(tmp_path, adapter)
    assert keys(path)[f"{FLAT}.alpha"].dtype == kept
    assert adapter_files.read(path).alphas == {Q: alpha}


def test_rslora_becomes_the_alpha_of_the_same_scale(tmp_path):
    adapter = make((Q, CONV), use_rslora=True)
    found = adapter_files.read(written(tmp_path, adapter))
    assert not found.use_rslora
    assert [found.scale(path) for path in (Q, CONV)] == pytest.approx([4.0, 1.5 / 3**0.5], rel=1e-15)


@pytest.mark.parametrize("alpha", [np.int64(8), np.array([8], "<f4"), None])
def test_forms_of_alpha_and_none(tmp_path, alpha):
    found = adapter_files.read(saved(tmp_path / "a.safetensors", linear(FLAT, 2, alpha)))
    assert found.alphas == {Q: 2.0 if alpha is None else 8.0}


def test_an_alpha_without_its_pair_is_refused(tmp_path):
    alone = {f"{FLAT.replace('to_q', 'to_k')}.alpha": np.array(2.0)}
    with pytest.raises(MissingTensorsError, match=r"alpha or a lora_mid of unet\..*\.to_k without its pair"):
        adapter_files.read(saved(tmp_path / "a.safetensors", {**linear(FLAT), **alone}))


@pytest.mark.parametrize("alpha", [0.0, np.nan, [1.0, 2.0]])
def test_an_alpha_that_is_none_is_refused(tmp_path, alpha):
    with pytest.raises(AdapterFormatError, match=r"alpha of unet\.down_blocks\..*\.to_q is .*; it must be one number"):
        adapter_files.read(saved(tmp_path / "a.safetensors", linear(FLAT, 2, alpha)))


@pytest.mark.parametrize(
    "name, path",
    [
        (
            "lora_unet_input_blocks_4_1_transformer_blocks_1_attn2_to_out_0",
            "unet.down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_out.0",
        ),
        ("lora_unet_output_blocks_2_2_conv", "unet.up_blocks.0.upsamplers.0.conv"),
        ("lora_unet_time_embed_0", "unet.time_embedding.linear_1"),
        ("lora_te1_text_model_encoder_layers_11_mlp_fc2", "text_encoder.text_model.encoder.layers.11.mlp.fc2"),
        ("lora_te2_text_projection", "text_encoder_2.text_projection"),
        ("lora_unet_up_blocks_3_resnets_2_conv_shortcut", "unet.up_blocks.3.resnets.2.conv_shortcut"),
    ],
)
def test_names_of_xl_s_original_code_and_of_both_text_encoders(tmp_path, name, path):
    assert adapter_files.read(saved(tmp_path / "a.safetensors", linear(name))).paths == [path]


def test_xl_s_text_encoders_are_te1_and_te2(tmp_path):
    adapter = make((TEXT,))
    renamed = {
        **adapter.tensors,
        **{
            (path.replace("text_encoder.", "text_encoder_2."), half): array
            for (path, half), array in adapter.tensors.items()
        },
    }
    adapter.tensors, adapter.alphas = renamed, dict.fromkeys((path for path, _ in renamed), 4.0)
    path = written(tmp_path, adapter)
    assert {key.partition("_text")[0] for key in keys(path)} == {"lora_te1", "lora_te2"}
    assert_same_pairs(adapter_files.read(path), adapter)


def test_names_are_found_among_the_network_s_own_paths(tmp_path):
    path = saved(tmp_path / "a.safetensors", {**linear("lora_unet_body_in_proj_0"), **linear(FLAT)})
    with pytest.raises(AdapterFormatError, match=r"paths are not known: lora_unet_body_in_proj_0\. Give the paths"):
        adapter_files.read(path)
    found = adapter_files.read(path, wanted=Wanted(paths=("body.in_proj.0", "unet.tail")))
    assert found.paths == ["unet.body.in_proj.0", Q]
    # Before those that are known.
    known = saved(tmp_path / "b.safetensors", linear("lora_unet_conv_in"))
    assert adapter_files.read(known).paths == ["unet.conv_in"]
    assert adapter_files.read(known, wanted=Wanted(paths=("unet.conv.in", "vae.conv_in"))).paths == ["unet.conv.in"]


def test_a_name_of_two_paths_is_an_error_that_names_both(tmp_path):
    path = saved(tmp_path / "a.safetensors", linear("lora_unet_body_in_proj_0"))
    wanted = Wanted(paths=("body.in_proj.0", "body.in.proj_0", "text_encoder.body_in.proj.0"))
    with pytest.raises(
        UnexpectedTensorsError, match=r"body_in_proj_0, which can be body\.in_proj\.0 and body\.in\.proj_0: kohya"
    ):
        adapter_files.read(path, wanted=wanted)


def test_cells_that_flatten_to_one_name_are_not_written(tmp_path):
    adapter = make((Q,))
    other = f"unet.{ATTENTION}_to.q"
    adapter.tensors |= {(other, half): adapter.tensors[Q, half] for half in "AB"}
    adapter.alphas[other] = 8.0
    with pytest.raises(UnexpectedTensorsError, match=rf"{Q} and {other} are both lora_unet_"):
        written(tmp_path, adapter)


def test_one_part_is_read_alone_and_the_other_s_names_do_not_matter(tmp_path):
    tensors = {**linear(FLAT, 2, 1.0), **linear("lora_te_unheard_of")}
    path = saved(tmp_path / "a.safetensors", tensors)
    assert adapter_files.read(path, wanted=Wanted("unet")).alphas == {Q: 1.0}
    with pytest.raises(AdapterError, match=r"nothing of the part text_encoder_2: it holds text_encoder, unet\."):
        adapter_files.read(path, wanted=Wanted("text_encoder_2"))


def test_three_matrices_of_a_convolution_become_two(tmp_path):
    rng = np.random.default_rng(2)
    down, mid, up = (rng.normal(size=shape).astype(np.float16) for shape in ((3, 4, 1, 1), (3, 3, 3, 5), (7, 3, 1, 1)))
    name = "lora_unet_down_blocks_0_resnets_0_conv1"
    tensors = {f"{name}.lora_{part}.weight": array for part, array in (("down", down), ("mid", mid), ("up", up))}
    found = adapter_files.read(saved(tmp_path / "a.safetensors", {**tensors, f"{name}.alpha": np.array(1.5)}))
    # W changes by up times mid times down, one after the other, at each element of the kernel.
    chain = np.einsum("op,pqhw,qi->oihw", up[:, :, 0, 0].astype("f8"), mid.astype("f8"), down[:, :, 0, 0].astype("f8"))
    np.testing.assert_allclose(found.delta(CONV), 0.5 * chain, rtol=0, atol=2e-6 * abs(chain).max())
    assert found.tensors[CONV, "A"].dtype == found.tensors[CONV, "B"].dtype == np.float32
    for wrong in (mid[:2], mid[:, :, 0, 0]):
        with pytest.raises(ShapeMismatchError, match=rf"lora_mid of {CONV} must be \[r, r, kh, kw\] between"):
            adapter_files.read(saved(tmp_path / "b.safetensors", {**tensors, f"{name}.lora_mid.weight": wrong}))


@pytest.mark.parametrize("shape", [(), (3,), (0, 6)])
def test_a_matrix_without_a_rank_is_named(tmp_path, shape):
    tensors = {**linear(FLAT), f"{FLAT}.lora_down.weight": np.ones(shape, np.float32)}
    with pytest.raises(AdapterError, match=r"A (and B must be matrices|or B is empty|\[r, in\])"):
        adapter_files.read(saved(tmp_path / "a.safetensors", tensors))


@pytest.mark.parametrize("lost", ["lora_down", "lora_up"])
def test_half_a_pair_is_named(tmp_path, lost):
    tensors = {key: array for key, array in linear(FLAT, 2, 1.0).items() if lost not in key}
    with pytest.raises(AdapterError, match="lacks half of 1 pairs"):
        adapter_files.read(saved(tmp_path / "a.safetensors", tensors))


@pytest.mark.parametrize(
    "key, name",
    [
        ("hada_w1_a", "a LoHa adapter"),
        ("lokr_w2", "a LoKr adapter"),
        ("on_input", "an IA3 adapter"),
        ("oft_blocks", "an OFT adapter"),
        ("a1.weight", "a GLoRA adapter"),
        ("diff", "weights trained in full"),
        ("dora_scale", "a DoRA adapter in kohya's form"),
    ],
)
def test_lycoris_s_other_forms_are_refused_by_name(tmp_path, key, name):
    tensors = {**linear(FLAT), f"{FLAT}.alpha": np.array(1.0), f"{FLAT}.{key}": np.ones((2, 2), np.float32)}
    with pytest.raises(AdapterFormatError, match=rf"{name}.*which mindlora cannot read\. Merge it into its base"):
        adapter_files.read(saved(tmp_path / "a.safetensors", tensors))


def test_dora_and_other_models_are_not_written(tmp_path):
    adapter = make((Q,))
    adapter.tensors[Q, "magnitude"] = np.ones(5, np.float32)
    with pytest.raises(AdapterError, match=r"Format 'kohya' holds no DoRA magnitudes: unet\."):
        written(tmp_path, adapter)
