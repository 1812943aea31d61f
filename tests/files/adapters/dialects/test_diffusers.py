"""diffusers' form: what is written is read back bit for bit, older keys are read, the settings in the header count."""

import json
import os

import numpy as np
import pytest
from safetensors import safe_open

from mindlora.core.errors import AdapterError, AdapterFormatError, RankMismatchError, UnexpectedTensorsError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.parts import Wanted
from tests.support import torch_zip
from tests.support.adapter_samples import make as make_llama
from tests.support.diffusion_adapters import CONV, OUT, TEXT, Q, assert_same_pairs, make, saved

WEIGHTS = "pytorch_lora_weights.safetensors"


def written(tmp_path, adapter, name="adapter"):
    path = str(tmp_path / name)
    adapter_files.write(adapter, path, "diffusers")
    return path


def settings(path):
    with safe_open(os.path.join(path, WEIGHTS), framework="np") as file:
        return json.loads(file.metadata()["lora_adapter_metadata"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ranks_and_alphas_of_each_cell_come_back(tmp_path, dtype):
    adapter = make(dtype=dtype, dropout=0.25, base_model="runwayml/stable-diffusion-v1-5")
    found = adapter_files.read(written(tmp_path, adapter))
    assert_same_pairs(found, adapter)
    assert (found.dialect, found.dropout, found.base_model) == ("diffusers", 0.25, adapter.base_model)
    # The file alone says the same.
    assert_same_pairs(adapter_files.read(str(tmp_path / "adapter" / WEIGHTS)), adapter)


def test_keys_and_settings_are_peft_s_below_the_name_of_the_part(tmp_path):
    path = written(tmp_path, make())
    with safe_open(os.path.join(path, WEIGHTS), framework="np") as file:
        assert set(file.keys()) == {f"{cell}.lora_{half}.weight" for cell in (Q, OUT, CONV, TEXT) for half in "AB"}
    found = settings(path)
    assert {key.partition(".")[0] for key in found} == {"unet", "text_encoder"}
    assert sorted(found["unet.target_modules"]) == sorted(cell[len("unet.") :] for cell in (Q, OUT, CONV))
    assert found["unet.task_type"] is None and found["text_encoder.r"] == 4
    # Newer text encoders have no level text_model, and PEFT compares ends of paths.
    assert found["text_encoder.target_modules"] == ["encoder.layers.0.self_attn.q_proj"]


def test_a_network_s_own_paths_get_the_part_that_they_are_of(tmp_path):
    adapter = make()
    bare = make(dialect="network")
    bare.tensors = {(path.partition(".")[2], part): array for (path, part), array in bare.tensors.items()}
    bare.alphas = {path.partition(".")[2]: alpha for path, alpha in bare.alphas.items()}
    assert_same_pairs(adapter_files.read(written(tmp_path, bare)), adapter)
    with pytest.raises(AdapterError, match=r"neither a UNet's nor a text encoder's .*: model\.layers\.0\.attention\.w"):
        written(tmp_path, make_llama(), "llama")
    assert not (tmp_path / "llama").exists()


def test_a_unet_that_was_saved_by_itself_has_no_part_in_its_keys(tmp_path):
    adapter = make((Q, CONV))
    tensors = {f"{path[5:]}.lora_{half}.weight": array for (path, half), array in adapter.tensors.items()}
    settings_of_unet = {"r": 4, "lora_alpha": 8, "rank_pattern": {CONV[5:]: 3}, "alpha_pattern": {CONV[5:]: 1.5}}
    path = saved(tmp_path / WEIGHTS, tensors, lora_adapter_metadata=settings_of_unet)
    assert_same_pairs(adapter_files.read(path), adapter)


def older(generation):
    """The keys of Q, OUT and TEXT in an older form: side -> function of the path."""
    adapter, tensors = make((Q, OUT, TEXT)), {}
    for (path, half), array in adapter.tensors.items():
        side = {"A": "down", "B": "up"}[half]
        parent, _, leaf = path.replace(".to_out.0", ".to_out").replace(".q_proj", ".to_q").rpartition(".")
        if generation == "lora.down":
            module = "lora" if path.startswith("unet") else "lora_linear_layer"
            tensors[f"{path}.{module}.{side}.weight"] = array
        elif path.startswith("unet"):
            tensors[f"{parent}.processor.{leaf}_lora.{side}.weight"] = array
        else:
            tensors[f"{parent}.{leaf}_lora.{side}.weight"] = array
    return adapter, tensors


@pytest.mark.parametrize("generation", ["lora.down", "processor"])
@pytest.mark.parametrize("part", [None, "unet"])
def test_older_keys_have_a_scale_of_1(tmp_path, generation, part):
    adapter, tensors = older(generation)
    if part == "unet":  # Older still: a UNet's processors alone, without its name.
        tensors = {key[5:]: array for key, array in tensors.items() if key.startswith("unet.")}
    found = adapter_files.read(saved(tmp_path / "old.safetensors", tensors))
    expected = {key: array for key, array in adapter.tensors.items() if part is None or key[0].startswith(part)}
    assert found.tensors.keys() == expected.keys()
    assert all(found.tensors[key].tobytes() == array.tobytes() for key, array in expected.items())
    assert {found.scale(path) for path in found.paths} == {1.0}


def test_the_pickle_of_the_first_versions_is_read_where_it_is_allowed(tmp_path):
    adapter, tensors = older("processor")
    torch_zip.save(tmp_path / "pytorch_lora_weights.bin", tensors)
    with pytest.raises(AdapterFormatError, match="is a pickle, which can run programs"):
        adapter_files.read(str(tmp_path))
    found = adapter_files.read(str(tmp_path), allow_pickle=True)
    assert all(found.tensors[key].tobytes() == array.tobytes() for key, array in adapter.tensors.items())


def test_rslora_of_one_part_goes_into_its_alphas(tmp_path):
    adapter = make((Q, TEXT))
    tensors = {f"{path}.lora_{half}.weight": array for (path, half), array in adapter.tensors.items()}
    content = {
        "unet.r": 4,
        "unet.lora_alpha": 8,
        "unet.use_rslora": True,
        "text_encoder.r": 4,
        "text_encoder.lora_alpha": 4,
    }
    found = adapter_files.read(saved(tmp_path / WEIGHTS, tensors, lora_adapter_metadata=content))
    assert not found.use_rslora and {path: found.scale(path) for path in found.paths} == {Q: 4.0, TEXT: 1.0}
    both = {**content, "text_encoder.use_rslora": True}
    found = adapter_files.read(saved(tmp_path / WEIGHTS, tensors, lora_adapter_metadata=both))
    assert found.use_rslora and {path: found.scale(path) for path in found.paths} == {Q: 4.0, TEXT: 2.0}
    assert_same_pairs(adapter_files.read(written(tmp_path, found)), found)


def test_dora_of_a_convolution_is_refused_as_such(tmp_path):
    adapter = make([CONV])
    arrays = {f"{CONV}.lora_{half}.weight": adapter.tensors[CONV, half] for half in "AB"}
    arrays[f"{CONV}.lora_magnitude_vector"] = np.ones((1, 7, 1, 1), np.float32)
    with pytest.raises(AdapterFormatError, match="DoRA on a convolution is not supported, at unet"):
        adapter_files.read(saved(tmp_path / "a.safetensors", arrays))


def test_dora_comes_back(tmp_path):
    adapter = make((Q,))
    adapter.tensors[Q, "magnitude"] = np.arange(1, 6, dtype=np.float32)
    path = written(tmp_path, adapter)
    assert settings(path)["unet.use_dora"] is True
    assert_same_pairs(adapter_files.read(path), adapter)


def test_one_part_is_read_alone(tmp_path):
    path = written(tmp_path, make())
    assert_same_pairs(adapter_files.read(path, wanted=Wanted("text_encoder")), make((TEXT,)))
    with pytest.raises(AdapterError, match=r"holds nothing of the part text_encoder_2: it holds text_encoder, unet\."):
        adapter_files.read(path, wanted=Wanted("text_encoder_2"))


@pytest.mark.parametrize(
    "header, error, message",
    [
        ("{", AdapterFormatError, "is not JSON"),
        ({"unet.r": 5, "unet.lora_alpha": 8}, RankMismatchError, "the configuration declares rank 5"),
        ({"unet.r": 4, "unet.lora_alpha": 0}, AdapterFormatError, "lora_alpha is 0; it must be a number above 0"),
    ],
)
def test_damaged_settings_are_refused(tmp_path, header, error, message):
    tensors = {f"{path}.lora_{half}.weight": array for (path, half), array in make((Q,)).tensors.items()}
    with pytest.raises(error, match=message):
        adapter_files.read(saved(tmp_path / WEIGHTS, tensors, lora_adapter_metadata=header))


def test_a_tensor_of_another_kind_is_named(tmp_path):
    tensors = {f"{path}.lora_{half}.weight": array for (path, half), array in make((Q,)).tensors.items()}
    tensors["unet.conv_in.bias"] = np.ones(3, np.float32)
    with pytest.raises(UnexpectedTensorsError, match=r"not LoRA's: unet\.conv_in\.bias\."):
        adapter_files.read(saved(tmp_path / WEIGHTS, tensors))


def test_saved_modules_have_no_place(tmp_path):
    adapter = make((Q,), saved_modules={"conv_in.weight": np.ones((1,), np.float32)})
    for form, path in (("diffusers", "a"), ("kohya", "a.safetensors")):
        with pytest.raises(AdapterError, match=rf"Format '{form}' holds no saved modules .*: conv_in\.weight\."):
            adapter_files.write(adapter, str(tmp_path / path), form)
    assert os.listdir(tmp_path) == []
