"""The reference of preference training: the network as training finds it, with the base's own parameters."""

from typing import Dict

import numpy as np
from mindspore import Parameter, nn

from mindlora.core.errors import ConfigError
from mindlora.models.names import TRANSIENT
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.embedding import NoisyEmbedding
from mindlora.network.tree import copy_cells, lora_cells, replace_children


def reference_network(network: nn.Cell) -> nn.Cell:
    """Returns cells that compute what ``network`` computes now, whatever it is trained to.

    They have the frozen parameters of ``network``, so the base is in memory once. An adapter that is new, and adds
    nothing yet, is left out. What else trains, such as an adapter that was loaded, is copied.

    Raises ConfigError if the adapters are still to be made from the base (lora_init: pissa and its kin).
    """
    waiting = [path for path, cell in lora_cells(network) if cell.awaits_initialization]
    if waiting:
        raise ConfigError(
            f"preference compares with the network as training finds it, and the adapter of {waiting[0]} takes its "
            "part out of the base when training begins (lora_init). Compute the reference before training (mindlora "
            "reference, precomputed_reference: True), use another lora_init, or a loss without a reference: simpo, "
            "orpo or cpo."
        )
    new = [cell for _, cell in lora_cells(network) if adds_nothing(cell)]
    left_out = {id(parameter) for cell in new for parameter in cell.lora_parameters()}
    trained = [p for p in network.get_parameters() if p.requires_grad and id(p) not in left_out]
    reference, copies = copy_cells(network, {id(parameter): _copy(parameter) for parameter in trained})
    replacements: Dict[int, nn.Cell] = {id(copies[id(cell)]): copies[id(cell)].plain_cell() for cell in new}
    for _, cell in reference.cells_and_names():
        if isinstance(cell, NoisyEmbedding):
            replacements[id(cell)] = cell.embedding
    replace_children(reference, replacements)
    reference.set_train(network.training)
    return reference


def adds_nothing(cell: LoRACell) -> bool:
    """Returns whether an adapter leaves the base's output as it is, because it is new."""
    zero_part = cell.parts()[cell.variant.zero_part]
    return bool(zero_part.has_init) or not np.any(zero_part.asnumpy())


def _copy(parameter):
    return Parameter(parameter.asnumpy().copy(), name=f"{TRANSIENT}reference.{parameter.name}", requires_grad=False)
