"""The base's weights, from a checkpoint into a network made for serving."""

import os
from typing import Dict

import numpy as np
from mindspore import Parameter, nn

from mindlora.base.convert import in_mindformers_names
from mindlora.base.joined import join, parts_of
from mindlora.base.reader import BaseCheckpoint
from mindlora.base.writer import OutputTensor
from mindlora.common.text import listed
from mindlora.errors import CheckpointError, ConfigError
from mindlora.nn.tensors import to_tensor

# What a network for serving has besides the base's weights.
_OWN = (".key_cache", ".value_cache")


def load_base(network: nn.Cell, path: str) -> None:
    """Fills every parameter of a network from a checkpoint of its base.

    Args:
        network (nn.Cell): A network of build_network, its linear cells quantized if the checkpoint is. No pools yet.
        path (str): A .ckpt or .safetensors file or a folder, under MindFormers' or Hugging Face's names.

    Raises:
        ConfigError: There is no path, or nothing is there.
        CheckpointError: The file cannot be read, or lacks parameters, or one has another shape or dtype.
    """
    if not path:
        raise ConfigError(
            "load_checkpoint is empty: a model with random weights has nothing to say. Name the base with "
            "--load_checkpoint."
        )
    if not os.path.exists(path):
        raise ConfigError(f"load_checkpoint: {path} does not exist (--load_checkpoint).")
    with BaseCheckpoint(path) as base:
        found = {tensor.name: tensor for tensor in in_mindformers_names(base)[0]}
        wanted = {p.name: p for p in network.get_parameters() if not p.name.endswith(_OWN)}
        _add_joined(wanted, found, _kv_heads(network))
        missing = sorted(set(wanted) - set(found))
        if missing:
            raise CheckpointError(
                f"{path} lacks {len(missing)} parameters of the network: {listed(missing)}. Name the checkpoint of the "
                "model that the YAML describes."
            )
        for name, parameter in wanted.items():
            _fill(parameter, found[name], path)


def _kv_heads(network):
    config = network.config
    return config.n_kv_heads or config.num_heads


def _add_joined(wanted: Dict[str, Parameter], found: Dict[str, OutputTensor], kv_heads: int) -> None:
    """Makes w_qkv and w_gate_hidden of the tensors that a checkpoint holds apart."""
    for name in set(wanted) - set(found):
        parts = parts_of(name)
        if parts and all(part in found for part in parts):
            found[name] = join(name, [found[part] for part in parts], kv_heads)


def _fill(parameter: Parameter, tensor: OutputTensor, path: str) -> None:
    packed = str(parameter.dtype) == "UInt8"
    if tuple(tensor.shape) != tuple(parameter.shape) or packed != (tensor.dtype == np.uint8):
        raise CheckpointError(
            f"{path}: {tensor.name} is {list(tensor.shape)} of {tensor.dtype}, and the network needs "
            f"{list(parameter.shape)} of {parameter.dtype}. Name the checkpoint of the model that the YAML describes"
            f"{'' if packed == (tensor.dtype == np.uint8) else ', and quantize_base as the checkpoint is'}."
        )
    array = tensor.rows(0, tensor.row_count).reshape(tensor.shape)
    parameter.set_data(to_tensor(array).astype(parameter.dtype))
