"""Networks with adapters, what is saved of them and edited by hand, for the tests of save_lora and load_lora."""

import json
import os
import pathlib

import pytest
from safetensors.numpy import load_file, save_file

from mindlora import LoraConfig, LoraError, apply_lora, load_lora
from tests.support.networks import TinyModel, adapters, randomize, snapshot

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FORMS = [("peft", "adapter"), ("ckpt", "adapter.ckpt")]


def network(target_modules=("wq", "wk"), seed=1, base=5, cell=TinyModel, **fields):
    """Returns a network with LoRA whose base and adapters are normal, told by their seeds."""
    result = cell()
    randomize(result.get_parameters(), base)
    apply_lora(result, LoraConfig(**{"lora_rank": 2, "lora_alpha": 3, "target_modules": target_modules, **fields}))
    randomize(adapters(result).values(), seed)
    return result


def key(layer, leaf, half):
    """Returns PEFT's name of a tensor."""
    return f"base_model.model.model.layers.{layer}.self_attn.{leaf}.lora_{half}.weight"


def refused(target, path, error, message, **arguments):
    """Asserts the class and the message of an error of load_lora, and that no byte of the network has changed."""
    before = snapshot(target)
    with pytest.raises(error) as caught:
        load_lora(target, path, **arguments)
    assert type(caught.value) is error and isinstance(caught.value, LoraError)
    assert message.replace("PATH", str(path)) in str(caught.value)
    assert snapshot(target) == before


def edited(path, edit, metadata=None):
    """Rewrites the tensors of an adapter folder after ``edit`` has changed their dict."""
    tensors = load_file(os.path.join(path, WEIGHTS))
    edit(tensors)
    save_file(tensors, os.path.join(path, WEIGHTS), metadata)


def configured(path, **fields):
    """Changes fields of an adapter_config.json."""
    file = pathlib.Path(path, CONFIG)
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
