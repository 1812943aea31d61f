"""Whether a checkpoint that MindFormers' PyNative Trainer loads is complete: MindFormers only logs what it lacks."""

from typing import Any, List, Mapping, MutableMapping

import mindspore as ms
from mindspore import Parameter, nn

from mindlora.core.errors import CheckpointError, ConfigError
from mindlora.core.text import listed
from mindlora.models import names
from mindlora.models.architectures.classifiers import is_of_head
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.stacked_dense import StackedLoRADense
from mindlora.network.quantized.nf4 import packed_parameters
from mindlora.network.tree import lora_cells

# quantize_base under MindFormers' PyNative Trainer: weights become 4-bit between checkpoint and model.


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


def check_loaded(network: nn.Cell, loaded: Mapping[str, Any]) -> None:
    """Checks that a checkpoint has all of the base, all of the adapters, or both, of a network with adapters.

    Args:
        network (nn.Cell): What MindFormers loads into; one without adapters is not checked.
        loaded (mapping): Name -> value of each parameter that the checkpoint has.

    Raises:
        CheckpointError: It has a part of the base or of the adapters, or adapters of cells that have none here.
    """
    cells = [cell for _, cell in network.cells_and_names() if isinstance(cell, (LoRACell, StackedLoRADense))]
    adapters = {parameter.name for cell in cells for parameter in cell.lora_parameters()}
    if not adapters:
        return
    # VeRA's shared projection is drawn again where a checkpoint lacks it.
    drawn = {parameter.name for _, cell in lora_cells(network) for parameter in cell.shared_parts().values()}
    base = {
        parameter.name
        for parameter in network.get_parameters()
        if parameter.name not in adapters | drawn and not names.is_computed(parameter.name)
    }
    head = set(filter(is_of_head, base))
    if not head & set(loaded):
        # The head of a classifier is new where its adapter is; check_checkpoint has looked whether that is so.
        base -= head
    for kind, expected in (("base", base), ("adapters", adapters)):
        missing = sorted(expected - set(loaded))
        if missing and len(missing) < len(expected):
            raise CheckpointError(
                f"The checkpoint has only a part of the {kind}; these are missing: {listed(missing)}. Load the "
                "checkpoint of the same model, with adapters on the same cells."
            )
    if not (base | adapters) & set(loaded):
        raise CheckpointError(
            f"The checkpoint has no parameter of this model, but {listed(sorted(loaded)) or 'nothing'}. Load one of "
            "the same model."
        )
    packed = sorted(
        parameter.name
        for parameter in network.get_parameters()
        if parameter.name in loaded and is_packed(loaded[parameter.name]) and not is_packed(parameter)
    )
    if packed:
        raise CheckpointError(
            f"The checkpoint has 4-bit weights, and the model has {listed(packed)} in float. Set pet_config."
            "quantize_base: nf4, or load a base in float."
        )
    extra = _adapters_of_other_cells(loaded, adapters)
    if extra:
        raise CheckpointError(
            f"The checkpoint has adapters on cells that have none here: {listed(extra)}. Make target_modules select "
            "them too."
        )


def _adapters_of_other_cells(loaded: Mapping[str, Any], adapters: set) -> List[str]:
    return sorted(name for name in loaded if name.endswith(("lora_a", "lora_b")) and name not in adapters)
