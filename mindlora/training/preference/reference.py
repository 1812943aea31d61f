"""The reference of preference training: the network as training finds it, with the base's own parameters."""

import copy
from typing import Dict

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindlora.errors import ConfigError
from mindlora.nn.cell import LoRACell
from mindlora.nn.noisy_embedding import NoisyEmbedding
from mindlora.nn.tree import lora_cells, replace_children
from mindlora.training.rate_factor import TRANSIENT


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
    shared = _shared_objects(network)
    new = [cell for _, cell in lora_cells(network) if adds_nothing(cell)]
    left_out = {id(parameter) for cell in new for parameter in cell.lora_parameters()}
    for parameter in network.get_parameters():
        is_copied = parameter.requires_grad and id(parameter) not in left_out
        shared[id(parameter)] = _copy(parameter) if is_copied else parameter
    reference = copy.deepcopy(network, shared)
    replacements: Dict[int, nn.Cell] = {id(shared[id(cell)]): shared[id(cell)].plain_cell() for cell in new}
    for _, cell in reference.cells_and_names():
        if isinstance(cell, NoisyEmbedding):
            replacements[id(cell)] = cell.embedding
    replace_children(reference, replacements)
    reference.set_train(network.training)
    return reference


def _shared_objects(network):
    """Returns {id: object} of what a copy of all cells has: their constants, and nothing that computes a cell again."""
    shared = {}
    for _, cell in network.cells_and_names():
        # MindSpore's for recompute() cannot be copied, and without a gradient it has nothing to do.
        recomputation = getattr(cell, "_recompute_cell", None)
        if recomputation is not None:
            shared[id(recomputation)] = None
        for value in vars(cell).values():
            if isinstance(value, Tensor) and not isinstance(value, Parameter):
                shared[id(value)] = value
    return shared


def adds_nothing(cell: LoRACell) -> bool:
    """Tells whether an adapter leaves the base's output as it is, because it is new."""
    zero_part = cell.parts()[cell.variant.zero_part]
    return bool(zero_part.has_init) or not np.any(zero_part.asnumpy())


def _copy(parameter):
    return Parameter(parameter.asnumpy().copy(), name=f"{TRANSIENT}reference.{parameter.name}", requires_grad=False)
