"""Networks with adapters, and their adapter files edited by hand, for the tests of save_lora and load_lora."""

import json
import os
import pathlib

from safetensors.numpy import load_file, save_file

from mindlora import LoraConfig, LoraError, apply_lora, load_lora
from tests.support.networks import TinyModel, adapters, randomize
from tests.support.refusals import part, refused_unchanged

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FORMS = [("peft", "adapter"), ("ckpt", "adapter.ckpt")]


def network(target_modules=("wq", "wk"), seed=1, base=5, cell=TinyModel, **fields):
    """Returns a network with LoRA whose base and adapters have normal values from their seeds."""
    result = cell()
    randomize(result.get_parameters(), base)
    apply_lora(result, LoraConfig(**{"lora_rank": 2, "lora_alpha": 3, "target_modules": target_modules, **fields}))
    randomize(adapters(result).values(), seed)
    return result


def key(layer, leaf, half):
    """Returns PEFT's key of a tensor."""
    return f"base_model.model.model.layers.{layer}.self_attn.{leaf}.lora_{half}.weight"


def load_refused(target, path, error, message, **arguments):
    """Asserts that load_lora raises an error of this class and leaves the network as it was.

    The error is a LoraError with ``message`` in it, where PATH stands for ``path``.
    """
    assert issubclass(error, LoraError)
    refused_unchanged(target, error, part(message.replace("PATH", str(path))), load_lora, target, path, **arguments)


def edited(path, edit, metadata=None):
    """Rewrites the tensors of an adapter folder after ``edit`` has changed their dict."""
    tensors = load_file(os.path.join(path, WEIGHTS))
    edit(tensors)
    save_file(tensors, os.path.join(path, WEIGHTS), metadata)


def configured(path, **fields):
    """Changes fields of an adapter_config.json."""
    file = pathlib.Path(path, CONFIG)
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
