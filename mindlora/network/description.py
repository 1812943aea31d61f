"""The description of a built network, which mindlora.models.trainable works on."""

from typing import Dict, Mapping

from mindspore import nn

from mindlora.core.numerics.pair_shapes import EXPERTS, LINEAR
from mindlora.models.architectures.architecture import ParameterSize
from mindlora.models.description import AdaptableCell, Description
from mindlora.models.lora_config import LoraConfig
from mindlora.network.cells.cell import groups_of
from mindlora.network.registry import adaptable_types, kind_of, nf4_type_of
from mindlora.network.tree import Tree, adapter_path, refusal, weight_of


def describe(tree: Tree, config: LoraConfig) -> Description:
    """Returns the description of a network without adapters, whose cells may refuse what ``config`` asks for."""
    # MindSpore lists a cell with two parents only once; put_lora finds its other occurrences by identity.
    adaptable = {
        path: _described(cell, adapter_path(cell, path), config) for path, cell in without_adapter(tree.cells).items()
    }
    parameters = {p.name: ParameterSize(tuple(p.shape), str(p.dtype).lower()) for p in tree.parameters()}
    linear = [path for path, cell in adaptable.items() if cell.layout is LINEAR]
    classes = {path: type(cell).__name__ for path, cell in tree.cells.items() if path not in linear}
    return Description(adaptable, parameters, classes)


def without_adapter(cells: Mapping[str, nn.Cell]) -> Dict[str, nn.Cell]:
    """Returns those of the cells of a network, by path, that can take an adapter and have none."""
    types = adaptable_types()
    # Multi-token prediction has embeddings and heads that are handed the model's weights at each call.
    return {
        path: cell for path, cell in cells.items() if path and isinstance(cell, types) and weight_of(cell) is not None
    }


def _described(cell: nn.Cell, prefix: str, config: LoraConfig) -> AdaptableCell:
    own_config = config.for_cell(prefix)
    kind = kind_of(cell, own_config)
    quantization_refusal = ""
    if config.quantize_base and kind.layout in (LINEAR, EXPERTS):
        quantization_refusal = refusal(nf4_type_of(cell).check, cell)
    return AdaptableCell(
        kind.layout,
        tuple(kind.weight_shape(cell)),
        prefix,
        groups_of(cell),
        refusal=refusal(kind.check, cell, own_config),
        quantization_refusal=quantization_refusal,
    )
