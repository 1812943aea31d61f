"""The description of a built network, which mindlora.config.selection works on."""

from typing import Mapping, Tuple

from mindspore import nn

from mindlora.models.architecture import ParameterSize
from mindlora.models.description import CONVOLUTION, EMBEDDING, EXPERTS, LINEAR, AdaptableCell, Description
from mindlora.nn.embedding import embedding_types
from mindlora.nn.experts import ExpertWeight
from mindlora.nn.linear_form import channels_of
from mindlora.nn.registry import adaptable_linear_types, adaptable_types
from mindlora.nn.tree import adapter_path, weight_of


def describe(network: nn.Cell, cells: Mapping[str, nn.Cell]) -> Description:
    """Returns the description of a network.

    Args:
        network (nn.Cell): The network, without adapters.
        cells (mapping): Path -> cell, from cells_and_weights(network).
    """
    adaptable = {}
    # MindSpore lists a cell with two parents only once; put_lora finds its other occurrences by identity.
    for path, cell in cells.items():
        if path and isinstance(cell, adaptable_types()):
            adaptable[path] = AdaptableCell(*_kind_and_shape(cell), adapter_path(cell, path))
    parameters = {}
    for parameter in network.get_parameters():
        parameters[parameter.name] = ParameterSize(tuple(parameter.shape), str(parameter.dtype).lower())
    linear = [path for path, cell in adaptable.items() if cell.kind == LINEAR]
    classes = {path: type(cell).__name__ for path, cell in cells.items() if path not in linear}
    return Description(adaptable, parameters, classes)


def _kind_and_shape(cell: nn.Cell) -> Tuple[str, Tuple[int, ...]]:
    if isinstance(cell, adaptable_linear_types()):
        return LINEAR, channels_of(cell)[::-1]
    if isinstance(cell, embedding_types()):
        return EMBEDDING, tuple(weight_of(cell).shape)
    if isinstance(cell, ExpertWeight):
        return EXPERTS, (cell.experts, cell.out_channels, cell.in_channels)
    return CONVOLUTION, tuple(cell.weight.shape)
