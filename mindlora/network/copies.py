"""Copies of the cells of a network that share its parameters, so that what they hold is in memory once."""

import copy
from typing import Any, Dict, Mapping, Optional, Tuple

from mindspore import Parameter, Tensor, nn


def copy_cells(network: nn.Cell, own: Optional[Mapping[int, Parameter]] = None) -> Tuple[nn.Cell, Dict[int, Any]]:
    """Returns a copy of all cells of ``network``, and {id of what was copied: its copy}.

    The copy has the parameters of ``network``, or, where ``own`` is id of a parameter -> another one, that one.
    """
    copies: Dict[int, Any] = {id(parameter): parameter for parameter in network.get_parameters()}
    copies.update(own or {})
    for _, cell in network.cells_and_names():
        # MindSpore's for recompute() cannot be copied, and without a gradient it has nothing to do.
        recomputation = getattr(cell, "_recompute_cell", None)
        if recomputation is not None:
            copies[id(recomputation)] = None
        for value in vars(cell).values():
            # Parameters among them are those that MindSpore is not told of (mindlora.network.invocation).
            if isinstance(value, Tensor):
                copies.setdefault(id(value), value)
    return copy.deepcopy(network, copies), copies
