"""The parameters of a run's network: those of the base, 4-bit ones, and those of the adapter."""

import contextlib
import dataclasses
import fnmatch
import logging
import math
from typing import Dict, Iterable, Iterator, List, Set, Tuple

from mindlora.common.text import listed
from mindlora.config import LoraConfig
from mindlora.errors import TargetError
from mindlora.models import names, targets
from mindlora.numerics import nf4
from mindlora.plan.leaves import leaf_of
from mindlora.plan.run import Run
from mindlora.plan.units import bytes_of

Shape = Tuple[int, ...]
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
    def leaf(self) -> str:
        """The last part of its cell's path, under the names of the legacy Llama."""
        return leaf_of(self.path)

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
    if run.lora is None:
        return base
    adapted = adapted_cells(run)
    trained = _trained_in_full(run, [weight.name for weight in base], adapted)
    packed = _packed_paths(run)
    wrong = sorted(trained & (packed | {f"{path}.{part}" for path in packed for part in ("weight", "bias")}))
    if wrong:
        raise TargetError(
            f"{listed(wrong)} would be trained and is quantized, and 4-bit weights do not train. Add it to "
            "quantize_exclude."
        )
    found: List[Weight] = []
    for weight in base:
        if weight.name in packed or weight.part == "weight" and weight.path in packed:
            found += _quantized(weight)
        else:
            trains = weight.name in trained and not names.is_balance(weight.name)
            found.append(dataclasses.replace(weight, trained=trains))
    return found + list(_adapter(run.lora, adapted, run.trains))


def _packed_paths(run: Run) -> Set[str]:
    """Returns the paths of the linear cells and stacked experts whose weights are 4-bit."""
    if run.lora is None or not run.lora.quantize_base:
        return set()
    return set(targets.select_quantized([*run.linear, *run.experts], run.lora.quantize_exclude))


def _trains_alone(run: Run, name: str) -> bool:
    """Tells whether a parameter is trained where there is no adapter; routers set the biases of experts themselves."""
    return run.lora is None and run.trains and not names.is_balance(name)


def adapted_cells(run: Run) -> Dict[str, Shape]:
    """Returns path -> (out, in) of the cells that get an adapter.

    An embedding counts as [vocabulary, hidden], and a stacked weight of routed experts as [experts, out, in].

    Raises:
        TargetError: What target_modules or target_parameters names is not there, or cannot have such an adapter.
    """
    lora = run.lora
    if lora is None:
        return {}
    sizes: Dict[str, Shape] = dict(run.linear)
    if lora.target_modules != targets.ALL_LINEAR:
        sizes[run.embedding[0]] = run.embedding[1]
    selected: List[str] = []
    if lora.target_modules is not None or lora.target_parameters is None:
        with _quiet(targets.logger):
            selected += targets.select_targets(
                list(sizes), lora.target_modules, lora.exclude_modules, layers=lora.layers_to_transform
            )
    if lora.target_parameters is not None:
        stacked = targets.select_parameters(
            list(run.experts), lora.target_parameters, lora.exclude_modules, lora.layers_to_transform
        )
        unserved = [field for field in _NOT_FOR_EXPERTS if getattr(lora, field)]
        if unserved:
            raise TargetError(
                f"pet_config has target_parameters and {' and '.join(unserved)}, which routed experts do not take. "
                "Leave one of the two out."
            )
        selected += stacked
    return {path: sizes[path] if path in sizes else run.experts[path] for path in selected}


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


def _adapter(lora: LoraConfig, adapted: Dict[str, Shape], trains: bool) -> Iterator[Weight]:
    frozen = _frozen(lora)
    for path, shape in adapted.items():
        for part, size in parts_of(lora, path, shape).items():
            trained = trains and not (part == "A" and lora.freeze_lora_a) and not frozen(f"{path}.{part}")
            yield Weight(path, part, size, lora.param_init_type, math.prod(size), trained, True)
    for part, size in shared_projection(lora, adapted).items():
        yield Weight("", part, size, lora.param_init_type, math.prod(size), False, True)


def _frozen(lora: LoraConfig):
    """Returns a function that tells whether freeze_include freezes a part of the adapter."""
    endings = {"A": "mindpet_delta_lora_a", "B": "mindpet_delta_lora_b", "magnitude": "mindpet_delta_lora_magnitude"}

    def frozen(name: str) -> bool:
        path, _, part = name.rpartition(".")
        full = f"{path}.{endings.get(part, part)}"
        return any(fnmatch.fnmatchcase(full, pattern) for pattern in lora.freeze_include or ())

    return frozen


def _trained_in_full(run: Run, parameters: List[str], adapted: Iterable[str]) -> Set[str]:
    """Returns the parameters of the base that modules_to_save and freeze_exclude train."""
    found: Set[str] = set()
    for module in run.lora.modules_to_save or () if run.lora else ():
        hits = {name for name in parameters if names.belongs_to(name, module)}
        if not hits:
            raise TargetError(
                f"modules_to_save names {module!r}, which matches no module. Parameters: {listed(parameters)}."
            )
        both = [path for path in adapted if any(name.startswith(path + ".") for name in hits)]
        if both:
            raise TargetError(
                f"modules_to_save names {module!r}, and so does target_modules: {listed(both)}. "
                "Keep each in one of the two: a module either trains itself or gets an adapter."
            )
        found |= hits
    for pattern in run.lora.freeze_exclude or () if run.lora else ():
        found |= {name for name in parameters if fnmatch.fnmatchcase(name, pattern)}
    frozen = {
        name
        for pattern in (run.lora.freeze_include or () if run.lora else ())
        for name in parameters
        if fnmatch.fnmatchcase(name, pattern)
    }
    return found - frozen if run.trains else set()


def _quantized(weight: Weight) -> Iterator[Weight]:
    for field, (shape, dtype) in nf4.layout(*weight.shape).items():
        count = weight.count if field == "codes" else 0
        yield Weight(weight.path, nf4.tensor_name(weight.part, field), shape, str(dtype), count)


def _split(name: str) -> Tuple[str, str]:
    path, _, part = name.rpartition(".")
    return path, part


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Keeps a logger from warning: the doctor says what it would."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
