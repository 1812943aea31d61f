"""Stable Diffusion's parts in conversions and reports: one file of several networks, and one network's folder."""

import json

import numpy as np
import pytest

from mindlora import cli
from mindlora.core.errors import AdapterError, LoraError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.convert import convert_adapter
from mindlora.files.adapters.inspect import inspect_adapter
from tests.support.diffusion_adapters import CONV, OUT, TEXT, Q, assert_same_pairs, make, pair, saved

PATHS = {"diffusers": "d", "kohya": "k.safetensors", "peft": "p", "mindformers": "m.safetensors", "ckpt": "c.ckpt"}


def written(tmp_path, adapter, form="diffusers"):
    path = str(tmp_path / "in" / PATHS[form])
    adapter_files.write(adapter, path, form)
    return path


@pytest.mark.parametrize("there", ["kohya", "diffusers"])
def test_the_two_forms_of_stable_diffusion_hold_the_same(tmp_path, there):
    back = {"kohya": "diffusers", "diffusers": "kohya"}[there]
    source = written(tmp_path, make(dtype=np.float16), back)
    for form in (there, back):
        output = str(tmp_path / PATHS[form])
        convert_adapter(source, output, form)
        source = output
    assert_same_pairs(adapter_files.read(source), make(dtype=np.float16))


@pytest.mark.parametrize("form", ["peft", "mindformers", "ckpt"])
def test_one_network_s_form_takes_one_part_and_gives_it_back(tmp_path, form):
    source, output = written(tmp_path, make()), str(tmp_path / PATHS[form])
    with pytest.raises(AdapterError, match=r"holds unet and text_encoder, .* Choose one with part \(--part unet\)"):
        convert_adapter(source, output, form)
    convert_adapter(source, output, form, part="unet")
    assert {path.partition(".")[0] for path in adapter_files.read(output).paths} == {"down_blocks"}
    convert_adapter(output, str(tmp_path / "back"), "diffusers")
    assert_same_pairs(adapter_files.read(str(tmp_path / "back")), make((Q, OUT, CONV)))


def test_a_text_encoder_goes_through_peft_and_can_be_called_the_second(tmp_path):
    source = written(tmp_path, make())
    convert_adapter(source, str(tmp_path / "p"), "peft", part="text_encoder")
    config = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    assert config["task_type"] is None and config["target_modules"] == ["encoder.layers.0.self_attn.q_proj"]
    convert_adapter(str(tmp_path / "p"), str(tmp_path / "one"), "diffusers")
    assert_same_pairs(adapter_files.read(str(tmp_path / "one")), make((TEXT,)))
    convert_adapter(str(tmp_path / "p"), str(tmp_path / "two"), "diffusers", part="text_encoder_2")
    assert adapter_files.read(str(tmp_path / "two")).paths == [TEXT.replace("encoder.", "encoder_2.", 1)]


def test_a_network_of_its_own_is_named_by_its_part_and_its_paths(tmp_path, capsys):
    a, b = pair(np.random.default_rng(0), 2, (6,), 5)
    tensors = {"lora_unet_body_0_in_proj.lora_down.weight": a, "lora_unet_body_0_in_proj.lora_up.weight": b}
    source = saved(tmp_path / "own.safetensors", tensors)
    paths = tmp_path / "paths.txt"
    paths.write_text("body.0.in_proj\n\nbody.0.out\n")
    assert (
        cli.main(["adapter", "convert", source, str(tmp_path / "p"), "--to", "peft", "--target-paths", str(paths)]) == 0
    )
    assert cli.main(["adapter", "inspect", source, "--target-paths", str(paths)]) == 0
    assert "unet: 1 cell, rank 2" in capsys.readouterr().out
    with pytest.raises(AdapterError, match=r"under diffusers' names: body\.0\.in_proj\. Say which part"):
        convert_adapter(str(tmp_path / "p"), str(tmp_path / "k.safetensors"), "kohya")
    convert_adapter(str(tmp_path / "p"), str(tmp_path / "k.safetensors"), "kohya", part="unet")
    assert set(tensors) < set(adapter_keys(tmp_path / "k.safetensors"))


def adapter_keys(path):
    from safetensors import safe_open

    with safe_open(str(path), framework="np") as file:
        return list(file.keys())


@pytest.mark.parametrize(
    "content, message", [(b"\n", "is empty"), (b"\xff\xfe\x00", "cannot be read"), (None, "cannot be read")]
)
def test_a_list_of_paths_that_is_none(tmp_path, content, message):
    if content is not None:
        (tmp_path / "paths").write_bytes(content)
    with pytest.raises(LoraError, match=message):
        inspect_adapter(written(tmp_path, make()), target_paths=str(tmp_path / "paths"))


def test_an_unknown_part_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(LoraError, match=r"part is 'vae', which is none of unet, text_encoder, text_encoder_2\."):
        convert_adapter(str(tmp_path / "absent"), str(tmp_path / "out"), "peft", part="vae")


@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_inspect_shows_the_parts(tmp_path, form):
    report = inspect_adapter(written(tmp_path, make(), form))
    assert [(part.part, part.cells, part.convolutions, part.ranks) for part in report.parts] == [
        ("unet", 3, 1, (2, 3, 4)),
        ("text_encoder", 1, 0, (4,)),
    ]
    assert report.dialect == form
    assert "unet: 3 cells, 1 of them convolutions, rank 2, 3, 4" in str(report)
    assert inspect_adapter(written(tmp_path, make((TEXT,)), "peft")).parts[0].part == "text_encoder"


def test_one_part_of_a_name_is_enough_to_write_the_kohya_file_from_the_command_line(tmp_path, capsys):
    output = str(tmp_path / "unet.safetensors")
    arguments = ["adapter", "convert", written(tmp_path, make()), output, "--to", "kohya", "--part", "unet", "--json"]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 3
    assert all(key.startswith("lora_unet_") for key in adapter_keys(output))
