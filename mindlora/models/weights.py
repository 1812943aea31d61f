"""The parameters of a network and of its adapter under a configuration: shapes, dtypes, and which of them train."""

import dataclasses
import math
from types import MappingProxyType
from typing import Callable, Iterator, List, Mapping, Optional, Tuple

import numpy as np

from mindlora.core.numerics import integers, nf4
from mindlora.core.numerics.dtypes import dtype_name, named_dtype
from mindlora.core.numerics.integers import IntegerForm
from mindlora.models import names
from mindlora.models.description import QUANTIZED_DTYPE, Description
from mindlora.models.lora_config import LoraConfig
from mindlora.models.trainable import Selection, freeze
from mindlora.models.variants.registry import PARAMETERS, SHARED_PARTS

Shape = Tuple[int, ...]
Layout = Mapping[str, Tuple[Shape, np.dtype]]
_PARAMETERS = {**PARAMETERS, **{name: part.parameter for name, part in SHARED_PARTS.items()}}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter of a network.

    Attributes:
        path (str): Path of its cell; empty for VeRA's shared projection.
        part (str): "weight", "bias", "A", "B", ...
        dtype (str): "float32", "float16", "bfloat16" or "uint8".
        count (int): Number of elements that it counts as: the codes of a quantized weight count as the weight, their
            scales as 0.
        trained (bool): Whether it gets a gradient.
        adapter (bool): Whether it belongs to the adapter.
    """

    path: str
    part: str
    shape: Shape
    dtype: str
    count: int
    trained: bool = False
    adapter: bool = False

    @property
    def name(self) -> str:
        """The name of the parameter in the network."""
        part = _PARAMETERS[self.part] if self.adapter else self.part
        return f"{self.path}.{part}".lstrip(".")

    @property
    def role(self) -> str:
        """The name of its cell in the legacy Llama, the last part of the path."""
        return names.role_of(self.path)

    @property
    def elements(self) -> int:
        """Elements of its tensor."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of its tensor."""
        return self.elements * named_dtype(self.dtype).itemsize


def weights_of(
    network: Description,
    config: Optional[LoraConfig],
    selection: Optional[Selection],
    held: Mapping[str, IntegerForm] = MappingProxyType({}),
) -> List[Weight]:
    """Returns all parameters of a network in training, including the adapter's; without ``config``, everything trains.

    ``held`` maps weights' names to the form of weights in integers.
    """
    base = []
    for name, (shape, dtype) in network.parameters.items():
        path, _, part = name.rpartition(".")
        # Routers set the biases of experts themselves.
        trained = name in selection.saved if selection else not names.is_balance(name)
        base.append(Weight(path, part, shape, dtype, math.prod(shape), trained))
    if config is None or selection is None:
        return base
    quantized = {network.cells[path].weight for path in selection.quantized}
    weights: List[Weight] = []
    for weight in base:
        if weight.name in held:
            weights += _packed(weight, held[weight.name].layout(*weight.shape), integers.tensor_name)
        elif weight.name in quantized:
            weights += _packed(weight, nf4.layout(*weight.shape), nf4.tensor_name)
        else:
            weights.append(weight)
    weights += _adapter(selection, config)
    packed = [weight.name for weight in weights if weight.dtype == QUANTIZED_DTYPE]
    settled = freeze({weight.name: weight.trained for weight in weights}, packed, config)
    return [dataclasses.replace(weight, trained=settled[weight.name]) for weight in weights]


def _packed(weight: Weight, layout: Layout, tensor_name: Callable[[str, str], str]) -> Iterator[Weight]:
    """Yields the tensors that hold a quantized weight."""
    for field, (shape, dtype) in layout.items():
        count = weight.count if field == "codes" else 0
        yield Weight(weight.path, tensor_name(weight.part, field), shape, dtype_name(dtype), count)


def _adapter(selection: Selection, config: LoraConfig) -> Iterator[Weight]:
    dtype, trained = config.param_init_type, config.variant.trained_parts(config)
    for prefix, parts in selection.parts.items():
        for part, shape in parts.items():
            yield Weight(prefix, part, shape, dtype, math.prod(shape), part in trained, True)
    for part, shape in selection.shared.items():
        yield Weight("", part, shape, dtype, math.prod(shape), False, True)
