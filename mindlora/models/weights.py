"""The parameters of a network and of its adapter under a configuration: shapes, dtypes, and which of them train."""

import dataclasses
import math
from typing import Iterator, List, Optional, Tuple

from mindlora.core.numerics import nf4
from mindlora.core.numerics.dtypes import named_dtype
from mindlora.models import names
from mindlora.models.description import QUANTIZED_DTYPE, Description
from mindlora.models.lora_config import LoraConfig
from mindlora.models.trainable import Selection, freeze
from mindlora.models.variants.registry import PARAMETERS, SHARED_PARTS

Shape = Tuple[int, ...]
_PARAMETERS = {**PARAMETERS, **{name: part.parameter for name, part in SHARED_PARTS.items()}}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter of a network.

    Attributes:
        path (str): Path of its cell; empty for VeRA's shared projection.
        part (str): "weight", "bias", "A", "B", ...
        dtype (str): "float32", "float16", "bfloat16" or "uint8".
        count (int): How many elements it counts as: the codes of a 4-bit weight count as that weight, their scales as
            nothing.
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
        """What its cell is, as the last part of the path of the legacy Llama's."""
        return names.role_of(self.path)

    @property
    def elements(self) -> int:
        """Elements of its tensor."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of its tensor."""
        return self.elements * named_dtype(self.dtype).itemsize


def weights_of(network: Description, config: Optional[LoraConfig], selection: Optional[Selection]) -> List[Weight]:
    """Returns all parameters of a network in training, the adapter's included; without ``config``, all of it trains."""
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
        weights += _in_4_bits(weight) if weight.name in quantized else [weight]
    weights += _adapter(selection, config)
    packed = [weight.name for weight in weights if weight.dtype == QUANTIZED_DTYPE]
    settled = freeze({weight.name: weight.trained for weight in weights}, packed, config)
    return [dataclasses.replace(weight, trained=settled[weight.name]) for weight in weights]


def _in_4_bits(weight: Weight) -> Iterator[Weight]:
    for field, (shape, dtype) in nf4.layout(*weight.shape).items():
        count = weight.count if field == "codes" else 0
        yield Weight(weight.path, nf4.tensor_name(weight.part, field), shape, str(dtype), count)


def _adapter(selection: Selection, config: LoraConfig) -> Iterator[Weight]:
    dtype, trained = config.param_init_type, config.variant.trained_parts(config)
    for prefix, parts in selection.parts.items():
        for part, shape in parts.items():
            yield Weight(prefix, part, shape, dtype, math.prod(shape), part in trained, True)
    for part, shape in selection.shared.items():
        yield Weight("", part, shape, dtype, math.prod(shape), False, True)
