"""Description: a network without its values, of the cells that can carry an adapter and of all parameters."""

import dataclasses
from typing import Dict, Mapping, NamedTuple, Tuple

from mindlora.models.architecture import LEGACY, MCORE, Architecture, ParameterSize

# The dtype in which 4-bit values are stored, two of them in one.
QUANTIZED = "uint8"
LINEAR, EMBEDDING, CONVOLUTION, EXPERTS = "linear", "embedding", "convolution", "experts"


class AdaptableCell(NamedTuple):
    """A cell that can carry an adapter, or the stacked weight of a layer's experts, which counts as one.

    Attributes:
        kind (str): "linear", "embedding", "convolution" or "experts".
        shape (tuple of int): [out, in] of a linear cell, [vocabulary, dim] of an embedding, [experts, out, in] of
            stacked experts; the weight's of a convolution.
        prefix (str): What the names of its parameters begin with, before the last dot; of stacked experts, the name of
            their weight.
    """

    kind: str
    shape: Tuple[int, ...]
    prefix: str

    @property
    def weight(self) -> str:
        """The name of its weight, unless it is an embedding."""
        return self.prefix if self.kind == EXPERTS else f"{self.prefix}.weight"

    def holds(self, parameter: str) -> bool:
        """Tells whether a parameter, by its name, is of this cell."""
        return parameter == self.prefix or parameter.startswith(self.prefix + ".")


@dataclasses.dataclass(frozen=True)
class Description:
    """A network.

    Attributes:
        cells (dict): Path -> AdaptableCell, in the network's order.
        parameters (dict): Name -> ParameterSize of all parameters.
        classes (dict): Path -> name of the class of every cell that is not linear, for messages. Default: none.
    """

    cells: Mapping[str, AdaptableCell]
    parameters: Mapping[str, ParameterSize]
    classes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of_kind(self, *kinds: str) -> Dict[str, AdaptableCell]:
        """Returns the cells of some kinds."""
        return {path: cell for path, cell in self.cells.items() if cell.kind in kinds}

    def is_quantized(self, parameter: str) -> bool:
        """Tells whether a parameter of the network, by its name, holds 4-bit values."""
        return parameter in self.parameters and self.parameters[parameter].dtype == QUANTIZED


def describe_model(architecture: Architecture, model_config: dict) -> Description:
    """Returns the description of the network that MindFormers builds under ``model_config``, a node of a YAML.

    Raises:
        ConfigError, TypeError, ValueError, ZeroDivisionError, AttributeError: The sizes cannot be worked out.
    """
    parameters = architecture.parameter_sizes(model_config)
    mcore = architecture.embedding_table(MCORE) in parameters
    # The names of mcore's parameters leave out the first part of their cells' paths.
    holder = "model." if mcore else ""
    cells = {}
    if not mcore:
        # Embeddings of mcore models take no adapter.
        embedding = architecture.embedding.mindformers
        cells[embedding] = AdaptableCell(EMBEDDING, parameters[architecture.embedding_table(LEGACY)].shape, embedding)
    for path, shape in architecture.linear_sizes(model_config).items():
        cells[holder + path] = AdaptableCell(LINEAR, shape, path)
    for name, size in parameters.items():
        for stack in architecture.experts:
            if name.endswith("." + stack.names.mcore):
                router = name.replace(stack.names.mcore, architecture.router.mcore)
                experts = parameters[f"{router}.weight"].shape[0]
                each = (size.shape[1], size.shape[0] // experts)
                cells[holder + name] = AdaptableCell(EXPERTS, (experts, *each), name)
    return Description(cells, parameters)
