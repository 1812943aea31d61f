"""The parameters of a run's network: those of the base, 4-bit ones, and those of the adapter."""

import dataclasses
import math
from typing import Dict, Iterator, List, Tuple

from mindlora.common.text import listed
from mindlora.config import LoraConfig
from mindlora.config.selection import freeze
from mindlora.config.variants.registry import PARTS, SHARED_PARTS
from mindlora.errors import TargetError
from mindlora.models import names
from mindlora.models.description import EMBEDDING, EXPERTS, QUANTIZED, AdaptableCell
from mindlora.numerics import initializers, nf4
from mindlora.plan.run import Run
from mindlora.plan.units import bytes_of

Shape = Tuple[int, ...]
# Part of an adapter -> its parameter's name; Lambda is AdaLoRA's, which no file holds.
_PARAMETERS = {part.name: part.parameter for part in (*PARTS.values(), *SHARED_PARTS.values())}
_PARAMETERS["lambda"] = "mindpet_delta_lora_lambda"
# What the cell of an embedding refuses.
_NOT_FOR_EMBEDDINGS = ("use_dora", "use_vera", "use_adalora", "freeze_lora_a")
# The cell of stacked experts refuses them.
_NOT_FOR_EXPERTS = ("lora_dropout", "use_dora", "use_vera", "use_adalora")


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter of a network.

    Attributes:
        path (str): Path of its cell; empty for VeRA's shared projection.
        part (str): "weight", "bias", "A", "B", ...
        shape (tuple of int): Its shape.
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
        """Path and part."""
        return f"{self.path}.{self.part}".lstrip(".")

    @property
    def parameter(self) -> str:
        """The name of the parameter in the network."""
        part = _PARAMETERS.get(self.part, self.part) if self.adapter else self.part
        return f"{self.path}.{part}".lstrip(".")

    @property
    def leaf(self) -> str:
        """The last part of its cell's path, under the names of the legacy Llama."""
        return names.role_of(self.path)

    @property
    def elements(self) -> int:
        """Elements of its tensor."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of its tensor."""
        return self.elements * (1 if self.dtype == "uint8" else bytes_of(self.dtype))


def weights_of(run: Run) -> List[Weight]:
    """Returns all parameters of the network that a run trains or asks, adapter included.

    Raises:
        TargetError: target_modules, modules_to_save or a pattern selects nothing, or a 4-bit weight would be trained.
    """
    base = [
        Weight(*_split(name), size.shape, size.dtype, math.prod(size.shape), _trains_alone(run, name))
        for name, size in run.parameters.items()
    ]
    selection = run.selection
    if run.lora is None or selection is None:
        return base
    _check_kinds(run.lora, list(selection.cells.values()))
    quantized = {cell.weight for path, cell in run.network.cells.items() if path in selection.quantized}
    weights: List[Weight] = []
    for weight in base:
        saved = dataclasses.replace(weight, trained=weight.name in selection.saved)
        weights += _quantized(saved) if weight.name in quantized else [saved]
    weights += _adapter(run.lora, adapted_cells(run))
    packed = [weight.parameter for weight in weights if weight.dtype == QUANTIZED]
    trained = freeze({weight.parameter: weight.trained for weight in weights}, packed, run.lora)
    return [dataclasses.replace(weight, trained=run.trains and trained[weight.parameter]) for weight in weights]


def _trains_alone(run: Run, name: str) -> bool:
    """Tells whether a parameter is trained where there is no adapter; routers set the biases of experts themselves."""
    return run.lora is None and run.trains and not names.is_balance(name)


def adapted_cells(run: Run) -> Dict[str, Shape]:
    """Returns path -> (out, in) of the cells that get an adapter.

    An embedding counts as [vocabulary, hidden], and a stacked weight of routed experts as [experts, out, in].

    Raises:
        TargetError: What target_modules or target_parameters names is not there, or cannot have such an adapter.
        ConfigError: VeRA on cells that do the work of several.
    """
    return {cell.prefix: cell.shape for cell in run.selection.cells.values()} if run.selection else {}


def _check_kinds(lora: LoraConfig, cells: List[AdaptableCell]) -> None:
    embeddings = [cell.prefix for cell in cells if cell.kind == EMBEDDING]
    stacks = [cell.prefix for cell in cells if cell.kind == EXPERTS]
    whole = ["lora_init"] if initializers.needs_whole_matrices(lora.lora_init) else []
    unserved = [field for field in _NOT_FOR_EMBEDDINGS if getattr(lora, field)] + whole
    if unserved and embeddings:
        raise TargetError(
            f"pet_config has {' and '.join(unserved)}, which embeddings do not take, and target_modules selects "
            f"{listed(embeddings)}. Add it to exclude_modules, or leave the other out."
        )
    unserved = [field for field in _NOT_FOR_EXPERTS if getattr(lora, field)] + whole
    unserved += ["lora_init"] if initializers.is_loftq(lora.lora_init) else []
    if unserved and stacks:
        raise TargetError(
            f"pet_config has target_parameters and {' and '.join(unserved)}, which routed experts do not take. "
            "Leave one of the two out."
        )


def parts_of(lora: LoraConfig, path: str, shape: Shape) -> Dict[str, Shape]:
    """Returns part -> shape of the adapter of one cell, without what cells share.

    Args:
        lora (LoraConfig): The adapter.
        path (str): Path of the cell.
        shape (tuple of int): (out, in) of its weight; [vocabulary, hidden] of an embedding, [experts, out, in] of
            stacked experts.
    """
    rank = lora.for_cell(path).lora_rank
    if len(shape) == 3:
        experts, rows, columns = shape
        return {"A": (experts, rank, columns), "B": (experts, rows, rank)}
    rows, columns = shape
    if lora.use_vera:
        return {"lambda_d": (rank,), "lambda_b": (rows,)}
    if names.is_embedding(path):
        return {"A": (rank, rows), "B": (columns, rank)}
    parts: Dict[str, Shape] = {"A": (rank, columns), "B": (rows, rank)}
    if lora.use_adalora:
        parts["lambda"] = (rank,)
    return {**parts, "magnitude": (rows,)} if lora.use_dora else parts


def shared_projection(lora: LoraConfig, adapted: Dict[str, Shape]) -> Dict[str, Shape]:
    """Returns name -> shape of what VeRA's cells share; nothing for another kind of adapter."""
    if not lora.use_vera:
        return {}
    widest = [max(shape[axis] for shape in adapted.values()) for axis in (0, 1)]
    return {"shared A": (lora.lora_rank, widest[1]), "shared B": (widest[0], lora.lora_rank)}


def _adapter(lora: LoraConfig, adapted: Dict[str, Shape]) -> Iterator[Weight]:
    for path, shape in adapted.items():
        for part, size in parts_of(lora, path, shape).items():
            trained = not (part == "A" and lora.freeze_lora_a)
            yield Weight(path, part, size, lora.param_init_type, math.prod(size), trained, True)
    for part, size in shared_projection(lora, adapted).items():
        yield Weight("", part, size, lora.param_init_type, math.prod(size), False, True)


def _quantized(weight: Weight) -> Iterator[Weight]:
    for field, (shape, dtype) in nf4.layout(*weight.shape).items():
        count = weight.count if field == "codes" else 0
        yield Weight(weight.path, nf4.tensor_name(weight.part, field), shape, str(dtype), count)


def _split(name: str) -> Tuple[str, str]:
    path, _, part = name.rpartition(".")
    return path, part
