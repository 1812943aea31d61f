"""Whether a checkpoint that MindFormers' PyNative Trainer loads is complete: MindFormers only logs what it lacks."""

from typing import Any, List, Mapping

from mindspore import nn

from mindlora.core.errors import CheckpointError
from mindlora.core.text import listed
from mindlora.models import names
from mindlora.network.tree import lora_cells
from mindlora.training.pynative.quantized_base import is_packed


def check_loaded(network: nn.Cell, loaded: Mapping[str, Any]) -> None:
    """Checks that a checkpoint has all of the base, all of the adapters, or both, of a network with adapters.

    Args:
        network (nn.Cell): What MindFormers loads into; one without adapters is not checked.
        loaded (mapping): Name -> value of each parameter that the checkpoint has.

    Raises:
        CheckpointError: It has a part of the base or of the adapters, or adapters of cells that have none here.
    """
    adapters = {parameter.name for _, cell in lora_cells(network) for parameter in cell.lora_parameters()}
    if not adapters:
        return
    # VeRA's shared projection is drawn again where a checkpoint lacks it.
    drawn = {parameter.name for _, cell in lora_cells(network) for parameter in cell.shared_parts().values()}
    base = {
        parameter.name
        for parameter in network.get_parameters()
        if parameter.name not in adapters | drawn and not names.is_computed(parameter.name)
    }
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
