"""quantize_base under MindFormers' PyNative Trainer: weights become 4-bit between checkpoint and model."""

from typing import Any, MutableMapping

import mindspore as ms
from mindspore import Parameter, nn

from mindlora.core.errors import ConfigError
from mindlora.network.quantized.nf4 import packed_parameters


def check_quantization(quantize_base: Any, checkpoint: Any, processes: int) -> None:
    """Raises ConfigError if quantize_base cannot be carried out.

    Args:
        quantize_base (str): That of pet_config, or None.
        checkpoint (CheckpointConfig): The node of the YAML.
        processes (int): Of the run.
    """
    if quantize_base is None:
        return
    if processes > 1:
        raise ConfigError(
            f"pet_config.quantize_base is {quantize_base!r} and this run has {processes} processes: under MindFormers' "
            "PyNative Trainer, mindlora quantizes a base in one process alone. Remove it, or start one process."
        )
    if not checkpoint.load_path and not getattr(checkpoint, "base_load_path", None):
        raise ConfigError(
            f"pet_config.quantize_base is {quantize_base!r}, and no base is loaded that could be quantized. Set "
            "checkpoint.load_path."
        )


def quantize_loaded(network: nn.Cell, loaded: MutableMapping[str, Parameter]) -> None:
    """Quantizes the weights of a checkpoint that a network has in 4 bits, in place, one after another.

    Those that are in 4 bits already, as in a checkpoint that such a run has saved, stay as they are.

    Args:
        network (nn.Cell): What the checkpoint is loaded into.
        loaded (mapping): Name -> value of each parameter that the checkpoint has.

    Raises:
        QuantizationError: A weight holds infinity or NaN.
    """
    for _, cell in network.cells_and_names():
        if getattr(cell, "quantization", None):
            name = cell.weight.name
            if name in loaded and not is_packed(loaded[name]):
                packed = packed_parameters(loaded[name], name, name)
                loaded.update({parameter.name: parameter for parameter in packed.values()})


def is_packed(parameter: Parameter) -> bool:
    """Returns whether a parameter holds 4-bit values, two in a byte."""
    return parameter.dtype == ms.uint8
