"""Description: the cells of a network that can carry an adapter, and all its parameters, without values."""

import dataclasses
from typing import Dict, Mapping, NamedTuple, Tuple

from mindlora.core.numerics.pair_shapes import EMBEDDING, EXPERTS, LINEAR, PairLayout
from mindlora.models import names
from mindlora.models.architectures.architecture import LEGACY, MCORE, Architecture, ParameterSize

# The dtype in which 4-bit values are stored, two of them in one.
QUANTIZED_DTYPE = "uint8"
NOT_QUANTIZED_SHARDED = (
    "The cell is sharded, but NF4 weights are not supported there. Leave quantize_base out, or set parallel_mode: 0."
)
SHARDED_EMBEDDING = (
    "The embedding is sharded, but LoRA on sharded embeddings is not supported. Add it to exclude_modules."
)


def expert_refusal(kind: str, experts: int) -> str:
    """Returns why a linear cell of class ``kind`` that holds the weights of several experts carries no adapter."""
    return f"{kind} holds {experts} experts; LoRA on expert weights is not supported. Add it to exclude_modules."


class AdaptableCell(NamedTuple):
    """A cell that can carry an adapter, or the stacked weight of a layer's experts, which counts as a cell.

    Attributes:
        layout (PairLayout): Its kind: LINEAR, EMBEDDING, CONVOLUTION or EXPERTS.
        shape (tuple of int): The shape of its weight, as layout.pair_shapes takes it.
        prefix (str): The names of its parameters up to the last dot; for stacked experts, the name of
            their weight.
        groups (int): Groups of a convolution.
        bases (tuple of str): Other properties of its base that an adapter may not support, such as SHARDED.
        refusal (str): Why it carries no adapter at all, or none of the configuration for which the
            network was described; "" if it does.
        quantization_refusal (str): Why its weight cannot be quantized; "" if it can.
    """

    layout: PairLayout
    shape: Tuple[int, ...]
    prefix: str
    groups: int = 1
    bases: Tuple[str, ...] = ()
    refusal: str = ""
    quantization_refusal: str = ""

    @property
    def weight(self) -> str:
        """The name of its weight, unless it is an embedding."""
        return self.prefix if self.layout is EXPERTS else f"{self.prefix}.weight"

    def sharded(self, *bases: str) -> "AdaptableCell":
        """Returns the cell as MindSpore divides it: ``bases`` gains SHARDED and, if its weight is divided too, CUT."""
        if self.layout is EMBEDDING and not names.is_mcore(self.prefix):
            return self._replace(refusal=SHARDED_EMBEDDING)
        return self._replace(bases=bases, quantization_refusal=NOT_QUANTIZED_SHARDED)

    def holds(self, parameter: str) -> bool:
        """Returns whether a parameter with this name belongs to this cell."""
        return parameter == self.prefix or parameter.startswith(self.prefix + ".")


@dataclasses.dataclass(frozen=True)
class Description:
    """A network: its cells in order, all its parameters, and the class name of every cell that is not linear."""

    cells: Mapping[str, AdaptableCell]
    parameters: Mapping[str, ParameterSize]
    classes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of_kind(self, *layouts: PairLayout) -> Dict[str, AdaptableCell]:
        """Returns the cells of some kinds."""
        return {path: cell for path, cell in self.cells.items() if cell.layout in layouts}

    def sharded(self, *bases: str) -> "Description":
        """Returns the network with all its cells sharded; as AdaptableCell.sharded."""
        return dataclasses.replace(self, cells={path: cell.sharded(*bases) for path, cell in self.cells.items()})

    def is_quantized(self, parameter: str) -> bool:
        """Returns whether the parameter of this name holds 4-bit values."""
        return parameter in self.parameters and self.parameters[parameter].dtype == QUANTIZED_DTYPE


def describe_model(architecture: Architecture, model_config: dict) -> Description:
    """Returns the description of the network that MindFormers builds under ``model_config``, a node of a YAML.

    Raises:
        ConfigError, TypeError, ValueError, ZeroDivisionError, AttributeError: The sizes cannot be worked out.
    """
    parameters = architecture.parameter_sizes(model_config)
    world = MCORE if architecture.embedding_table(MCORE) in parameters else LEGACY
    # The names of mcore's parameters leave out the first part of their cells' paths.
    holder = "model." if world == MCORE else ""
    cells = {}
    table = architecture.embedding_table(world)
    if table in parameters:
        embedding = architecture.embedding.under(world)
        cells[holder + embedding] = AdaptableCell(EMBEDDING, parameters[table].shape, embedding)
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


def with_experts(network: Description, experts: int) -> Description:
    """Returns the description of a legacy Llama whose feed-forward cells hold routed experts, as Mixtral's do.

    Args:
        network (Description): The same model without experts.
        experts (int): How many experts a layer has.
    """
    refusal = expert_refusal("Linear", experts)
    cells: Dict[str, AdaptableCell] = {}
    parameters = dict(network.parameters)
    for path, cell in network.cells.items():
        layer, inside, leaf = path.partition(".feed_forward.")
        if not inside:
            cells[path] = cell
            continue
        stacked = cell._replace(
            prefix=f"{layer}.feed_forward.ffn.{leaf}", refusal=refusal, quantization_refusal=refusal
        )
        cells[stacked.prefix] = stacked
        weight = parameters.pop(cell.weight)
        parameters[stacked.weight] = weight._replace(shape=(experts, *weight.shape))
        if leaf == "w2":
            router = AdaptableCell(LINEAR, (experts, cell.shape[0]), f"{layer}.feed_forward.router.dense")
            cells[router.prefix] = router
            parameters[router.weight] = ParameterSize(router.shape, "float32")
    return Description(cells, parameters)
