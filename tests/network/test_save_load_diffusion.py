"""save_lora and load_lora of Stable Diffusion's forms: a UNet by itself, a text encoder by itself, both in a cell."""

import numpy as np
import pytest
from mindspore import nn

from mindlora import LoraConfig, LoraError, apply_lora, load_lora, save_lora
from mindlora.core.errors import AdapterError, UnexpectedTensorsError
from mindlora.files.adapters import files as adapter_files
from mindlora.network.save_load import adapter_of
from tests.support.diffusion_adapters import CELLS, CONV, OUT, TEXT, Q, assert_same_pairs, make
from tests.support.networks import adapters, randomize
from tests.support.refusals import refused_unchanged

FORMS = {"diffusers": "adapter", "kohya": "adapter.safetensors"}


def nested(paths):
    """Returns a network with a linear cell or a convolution at each of the paths."""
    network = nn.Cell()
    for path, cell in paths.items():
        parent = network
        *parents, leaf = path.split(".")
        for name in parents:
            if name not in parent._cells:
                parent.insert_child_to_cell(name, nn.Cell())
            parent = parent._cells[name]
        parent.insert_child_to_cell(leaf, cell)
    network.update_parameters_name("")
    randomize(network.get_parameters(), 1)
    return network


def cell(path):
    """Returns a cell of the size that the samples are for."""
    _, _, ends, out = CELLS[path]
    if len(ends) == 1:
        return nn.Dense(ends[0], out)
    return nn.Conv2d(ends[0], out, ends[1:], pad_mode="pad", padding=1)


def unet():
    return nested({path[len("unet.") :]: cell(path) for path in (Q, OUT, CONV)})


def text_encoder(level="text_model."):
    return nested({TEXT[len("text_encoder.text_model.") :] if not level else TEXT[len("text_encoder.") :]: cell(TEXT)})


def assert_loaded(network, expected, prefix=""):
    """Asserts that a network's adapter is ``expected``, whose paths begin with ``prefix`` and the network's do not."""
    found = adapter_of(network)
    renamed = {(prefix + path, part): array for (path, part), array in found.tensors.items()}
    assert renamed.keys() == expected.tensors.keys()
    assert all(np.array_equal(renamed[key], array) for key, array in expected.tensors.items())
    assert {prefix + path: found.scale(path) for path in found.paths} == {
        path: expected.scale(path) for path in expected.paths
    }


@pytest.mark.parametrize("form, name", FORMS.items())
def test_a_unet_s_adapter_is_saved_under_unet_and_loaded_back(tmp_path, form, name):
    trained, path = unet(), str(tmp_path / name)
    apply_lora(
        trained, LoraConfig(lora_rank=3, lora_alpha=5, target_modules=["to_q", "conv1"], rank_pattern={"to_q": 2})
    )
    randomize(adapters(trained).values(), 2)
    save_lora(trained, path, form)
    saved = adapter_files.read(path)
    assert {cell.partition(".")[0] for cell in saved.paths} == {"unet"} and len(saved.paths) == 2
    assert_loaded(trained, saved, "unet.")
    other = unet()
    load_lora(other, path)
    assert_loaded(other, saved, "unet.")
    # And into cells that were there before.
    randomize(adapters(other).values(), 3)
    load_lora(other, path)
    assert_loaded(other, saved, "unet.")


@pytest.mark.parametrize("form, name", FORMS.items())
def test_the_parts_of_one_file_go_into_the_networks_that_they_are_of(tmp_path, form, name):
    path = str(tmp_path / name)
    adapter_files.write(make(), path, form)
    message = (
        f"{path} holds unet and text_encoder, which are networks of their own. Choose one with part (--part unet)."
    )
    first, second, third = unet(), text_encoder(), text_encoder("")
    refused_unchanged(first, AdapterError, message, load_lora, first, path)
    load_lora(first, path, part="unet")
    assert_loaded(first, make((Q, OUT, CONV)), "unet.")
    load_lora(second, path, part="text_encoder")
    assert_loaded(second, make((TEXT,)), "text_encoder.")
    load_lora(third, path, part="text_encoder")
    assert_loaded(third, make((TEXT,)), "text_encoder.text_model.")
    both = nested({path: cell(path) for path in CELLS})
    load_lora(both, path)
    assert_loaded(both, make())
    save_lora(both, path, form)
    assert_same_pairs(adapter_files.read(path), make())
    save_lora(both, path, form, part="text_encoder")
    assert_same_pairs(adapter_files.read(path), make((TEXT,)))


def test_what_does_not_fit_the_network_is_named(tmp_path):
    path = str(tmp_path / "adapter")
    adapter_files.write(make((Q,)), path, "diffusers")
    network = text_encoder()
    with pytest.raises(UnexpectedTensorsError, match=r"no place for: down_blocks\.0\..*to_q A"):
        load_lora(network, path)
    with pytest.raises(LoraError, match="part is 'clip', which is none of unet"):
        load_lora(network, path, part="clip")


def test_a_network_of_its_own_says_which_part_it_is(tmp_path):
    def make_network():
        return nested({"body.in_proj": nn.Dense(6, 5)})

    network, path = make_network(), str(tmp_path / "own.safetensors")
    apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=4, target_modules="all-linear"))
    randomize(adapters(network).values(), 2)
    with pytest.raises(AdapterError, match=r"neither a UNet's nor a text encoder's .*: body\.in_proj\."):
        save_lora(network, path, "kohya")
    with pytest.raises(LoraError, match=r"part is 'unet', but format 'peft' has no parts"):
        save_lora(network, str(tmp_path / "peft"), "peft", part="unet")
    save_lora(network, path, "kohya", part="unet")
    # The name lora_unet_body_in_proj finds its path among the network's own.
    other = make_network()
    load_lora(other, path)
    assert adapter_of(other).paths == ["body.in_proj"]
    assert all(
        np.array_equal(*pair) for pair in zip(adapter_of(other).tensors.values(), adapter_of(network).tensors.values())
    )
