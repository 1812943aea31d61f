"""Stable Diffusion's adapter files and diffusers: what it saves is read, what is written it loads to the same."""

import os

import numpy as np
import pytest

from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.convert import convert_adapter
from mindlora.models.architectures import diffusion

# Where alpha differs from the rank; "conv1" and "ff.net.0.proj" have ranks of their own.
ALPHAS = {"conv1": 1.5, "to_q": 7, "up_blocks.1.resnets.0.conv1": 9}


@pytest.fixture(scope="module")
def outputs(peer, tmp_path_factory):
    """Returns a function that returns what diffusers computes with an adapter of a path: noise and words."""
    folder = tmp_path_factory.mktemp("outputs")

    def compute(adapter=None, **keys):
        path = folder / f"{len(os.listdir(folder))}.npz"
        peer.diffusion_outputs(path=path, adapter=adapter, **keys)
        with np.load(path) as found:
            return dict(found)

    return compute


def assert_equal(found, expected):
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_close(found, expected):
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=2e-6 * abs(array).max(), err_msg=name)


def test_ranks_alphas_and_bits_pass_through_both_forms(peer, outputs, tmp_path):
    made = str(tmp_path / "made")
    peer.save_diffusion(folder=made, form="diffusers", alphas=ALPHAS, dropout=0.1)
    expected = outputs(made)
    base = outputs()
    assert all(abs(expected[name] - base[name]).max() > 1e-2 for name in base)
    paths = {
        form: str(tmp_path / name) for form, name in {"diffusers": "d", "kohya": "k.safetensors", "peft": "p"}.items()
    }
    convert_adapter(made, paths["kohya"], "kohya")
    convert_adapter(paths["kohya"], paths["diffusers"], "diffusers")
    assert_equal(outputs(paths["diffusers"]), expected)
    # Each part through PEFT's folder of one network.
    for part in ("unet", "text_encoder"):
        convert_adapter(made, paths["peft"], "peft", part=part, overwrite=True)
        convert_adapter(paths["peft"], paths["diffusers"], "diffusers", overwrite=True)
        found = outputs(paths["diffusers"])
        words, noise = (expected, base) if part == "text_encoder" else (base, expected)
        assert_equal(found, {"words": words["words"], "noise": noise["noise"]})
        if part == "unet":
            assert_equal(outputs(paths["peft"], prefix="peft"), found)


def test_diffusers_reads_kohya_s_form_as_it_is_written(peer, outputs, tmp_path):
    # One rank and one alpha: diffusers loses a module's own alpha at the attention processors.
    made, ours = str(tmp_path / "made"), str(tmp_path / "ours.safetensors")
    peer.save_diffusion(folder=made, form="old")
    convert_adapter(made, ours, "kohya")
    assert_close(outputs(ours), outputs(made))


def test_what_diffusers_writes_in_kohya_s_form_is_read(peer, outputs, tmp_path):
    peer.save_diffusion(folder=str(tmp_path), form="kohya")
    theirs = str(tmp_path / "kohya.safetensors")
    found = adapter_files.read(theirs)
    assert {found.scale(path) for path in found.paths} == {1.0} and len(found.paths) > 30
    convert_adapter(theirs, str(tmp_path / "ours"), "diffusers")
    assert_close(outputs(str(tmp_path / "ours")), outputs(theirs))


@pytest.mark.parametrize("form", ["old", "unet"])
def test_older_keys_and_a_unet_by_itself_are_read(peer, outputs, tmp_path, form):
    made = str(tmp_path / "made")
    peer.save_diffusion(folder=made, form=form, **({"alphas": ALPHAS} if form == "unet" else {}))
    convert_adapter(made, str(tmp_path / "ours"), "diffusers")
    expected = outputs(made, prefix=None if form == "unet" else "unet")
    assert_close(outputs(str(tmp_path / "ours")), expected)


@pytest.mark.parametrize("size, unet", [("sd", diffusion.SD), ("xl", diffusion.SDXL)])
def test_the_paths_of_real_unets_are_those_of_diffusers(peer, size, unet):
    assert peer.diffusion_cells(size=size) == sorted(diffusion.unet_paths(unet))


def test_xl_s_original_names_mean_what_diffusers_takes_them_for(peer):
    names = {"lora_unet_" + old.replace(".", "_"): path for path, old in diffusion.unet_paths(diffusion.SDXL).items()}
    found = peer.original_names(keys=list(names))
    theirs = {key.partition(".")[0]: name.partition(".lora_")[0].replace("unet.", "", 1) for key, name in found.items()}
    assert len(theirs) == len(names)
    assert theirs == names
