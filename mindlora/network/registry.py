"""The classes of cells that put an adapter on a base cell, one line for each kind; the description of a network."""

from typing import Dict, Mapping, Tuple, Type, Union

from mindspore import nn

from mindlora.core.numerics.pair_shapes import EXPERTS, LINEAR
from mindlora.models.architectures.architecture import ParameterSize
from mindlora.models.description import AdaptableCell, Description
from mindlora.models.lora_config import NF4, LoraConfig
from mindlora.network.cells.cell import LoRACell, groups_of
from mindlora.network.cells.conv import LoRAConv2d, LoRAMintConv2d
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.embedding import LoRAEmbedding, LoRAParallelEmbedding
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight
from mindlora.network.cells.linear_base import parallel_linear_types, pynative_linear_types
from mindlora.network.cells.parallel_linear import (
    LoRAParallelLinear,
    NF4ParallelLinear,
    QLoRAParallelLinear,
    QuantizedParallelBase,
    on_parallel_linear,
)
from mindlora.network.pynative.embedding import LoRAPyNativeEmbedding
from mindlora.network.pynative.experts import LoRAPyNativeExpertWeight, PyNativeExpertWeight
from mindlora.network.pynative.linear import (
    AdaLoRAPyNativeLinear,
    DoRAPyNativeLinear,
    LoRAPyNativeLinear,
    MiSSPyNativeLinear,
    VeRAPyNativeLinear,
)
from mindlora.network.pynative.nf4 import NF4PyNativeExpertWeight, NF4PyNativeLinear, QLoRAPyNativeLinear, on_nf4
from mindlora.network.quantized.nf4 import NF4Dense, NF4ExpertWeight, QLoRADense, QLoRAExpertWeight
from mindlora.network.quantized.quantized_dense import on_quantized
from mindlora.network.tree import Tree, adapter_path, refusal, weight_of
from mindlora.network.variants.adalora import AdaLoRADense
from mindlora.network.variants.dora import DoRADense
from mindlora.network.variants.miss import MiSSDense
from mindlora.network.variants.vera import VeRADense

# Variants on linear cells: nn.Dense, MindFormers' Linear and, by on_parallel_linear, those of its mcore models.
LINEAR_VARIANTS = (DoRADense, VeRADense, AdaLoRADense, MiSSDense)
# Variants on QuantizedDense.
QUANTIZED_VARIANTS = tuple(map(on_quantized, LINEAR_VARIANTS))
# Variants on MindFormers' Linear of PyNative models.
PYNATIVE_VARIANTS = (DoRAPyNativeLinear, MiSSPyNativeLinear, VeRAPyNativeLinear, AdaLoRAPyNativeLinear)
# kind_of picks the first one that can adapt the base cell and has the configured variant.
KINDS = (
    *map(on_parallel_linear, LINEAR_VARIANTS),
    LoRAParallelLinear,  # linear cells of MindFormers' mcore models
    *(on_parallel_linear(kind, QuantizedParallelBase) for kind in QUANTIZED_VARIANTS),
    QLoRAParallelLinear,  # NF4ParallelLinear, IntegerParallelLinear
    *map(on_nf4, PYNATIVE_VARIANTS),
    QLoRAPyNativeLinear,  # NF4PyNativeLinear, also an instance of MindFormers' Linear
    *PYNATIVE_VARIANTS,
    LoRAPyNativeLinear,  # linear cells of MindFormers' PyNative models
    *LINEAR_VARIANTS,
    LoRADense,  # nn.Dense and MindFormers' Linear
    *QUANTIZED_VARIANTS,
    QLoRADense,  # QuantizedDense
    LoRAParallelEmbedding,  # VocabParallelEmbedding of MindFormers' mcore models
    LoRAPyNativeEmbedding,  # VocabEmbedding of MindFormers' PyNative models
    LoRAEmbedding,  # nn.Embedding and MindFormers' LlamaEmbedding
    LoRAConv2d,  # nn.Conv2d
    LoRAMintConv2d,  # mint.nn.Conv2d
    QLoRAExpertWeight,  # NF4ExpertWeight
    LoRAPyNativeExpertWeight,  # PyNativeExpertWeight, of MindFormers' PyNative models, in float and in 4 bits
    LoRAExpertWeight,  # ExpertWeight, of MindFormers' mcore models
)


def kind_of(cell: nn.Cell, config: LoraConfig) -> Type[LoRACell]:
    """Returns the class whose from_cell puts the adapter that ``config`` describes on ``cell``, a cell of the base.

    If no class can adapt the cell, or none provides that adapter, the check of the returned class raises the
    reason.
    """
    kinds = [kind for kind in KINDS if isinstance(cell, kind.base_types())] or [LoRADense]
    return next((kind for kind in kinds if kind.variant is config.variant), kinds[-1])


def nf4_type_of(cell: nn.Cell) -> Union[Type[NF4Dense], Type[NF4ExpertWeight], Type[NF4PyNativeExpertWeight]]:
    """Returns the class whose from_dense quantizes ``cell``, a linear cell or a stacked weight of experts in float."""
    if isinstance(cell, PyNativeExpertWeight):
        return NF4PyNativeExpertWeight
    if isinstance(cell, ExpertWeight):
        return NF4ExpertWeight
    if isinstance(cell, pynative_linear_types()):
        return NF4PyNativeLinear
    return NF4ParallelLinear if isinstance(cell, parallel_linear_types()) else NF4Dense


def adaptable_types() -> Tuple[type, ...]:
    """Returns the classes of cells that can carry an adapter."""
    return tuple({base: None for kind in KINDS for base in kind.base_types()})


def adaptable_linear_types() -> Tuple[type, ...]:
    """Returns the classes of linear cells that can carry an adapter: cells in float, and NF4Dense."""
    return tuple({base: None for kind in KINDS if issubclass(kind, LoRADense) for base in kind.base_types()})


def describe(tree: Tree, config: LoraConfig) -> Description:
    """Returns the description of a network without adapters, with its cells' refusals of ``config``."""
    # MindSpore lists a cell with two parents only once; put_lora finds its other occurrences by identity.
    adaptable = {
        path: _described(cell, adapter_path(cell, path), config) for path, cell in without_adapter(tree.cells).items()
    }
    parameters = {p.name: ParameterSize(tuple(p.shape), str(p.dtype).lower()) for p in tree.parameters()}
    linear = [path for path, cell in adaptable.items() if cell.layout is LINEAR]
    classes = {path: type(cell).__name__ for path, cell in tree.cells.items() if path not in linear}
    return Description(adaptable, parameters, classes)


def without_adapter(cells: Mapping[str, nn.Cell]) -> Dict[str, nn.Cell]:
    """Returns the cells of a network, by path, that can take an adapter and have none."""
    types = adaptable_types()
    # Multi-token prediction has embeddings and heads that get the model's weights at each call.
    return {
        path: cell for path, cell in cells.items() if path and isinstance(cell, types) and weight_of(cell) is not None
    }


def _described(cell: nn.Cell, prefix: str, config: LoraConfig) -> AdaptableCell:
    own_config = config.for_cell(prefix)
    kind = kind_of(cell, own_config)
    quantization_refusal = ""
    if config.quantize_base == NF4 and kind.layout in (LINEAR, EXPERTS):
        quantization_refusal = refusal(nf4_type_of(cell).check, cell)
    return AdaptableCell(
        kind.layout,
        tuple(kind.weight_shape(cell)),
        prefix,
        groups_of(cell),
        refusal=refusal(kind.check, cell, own_config),
        quantization_refusal=quantization_refusal,
    )
