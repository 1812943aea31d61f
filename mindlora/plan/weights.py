"""The parameters of a run's network: those of the base, 4-bit ones, and those of the adapter."""

import contextlib
import dataclasses
import fnmatch
import logging
import math
from typing import Dict, Iterable, Iterator, List, Optional, Set, Tuple

from mindlora.adapters.pair_kinds import PARTS, SHARED_PARTS
from mindlora.common.text import listed
from mindlora.config import LoraConfig
from mindlora.errors import TargetError
from mindlora.models import names, targets
from mindlora.numerics import initializers, nf4
from mindlora.plan.leaves import leaf_of
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
    saved = _saved_modules(run.lora, [weight.name for weight in base], adapted)
    base = [dataclasses.replace(weight, trained=weight.name in saved) for weight in base]
    weights = _settled(run, [*base, *_adapter(run.lora, adapted)])
    packed = _packed_paths(run)
    quantized = [w for w in weights if w.name in packed or w.part == "weight" and w.path in packed]
    wrong = sorted(weight.name for weight in quantized if weight.trained)
    if wrong:
        raise TargetError(
            f"{listed(wrong)} would be trained and is quantized, and 4-bit weights do not train. Add it to "
            "quantize_exclude."
        )
    return [part for weight in weights for part in (_quantized(weight) if weight in quantized else [weight])]


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
        ConfigError: VeRA on cells that do the work of several.
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
    unserved = [field for field in _NOT_FOR_EMBEDDINGS if getattr(lora, field)]
    unserved += ["lora_init"] if initializers.needs_whole_matrices(lora.lora_init) else []
    if unserved and run.embedding[0] in selected:
        raise TargetError(
            f"pet_config has {' and '.join(unserved)}, which embeddings do not take, and target_modules selects "
            f"{run.embedding[0]}. Add it to exclude_modules, or leave the other out."
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
    if lora.use_vera:
        targets.check_vera(selected)
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


def _adapter(lora: LoraConfig, adapted: Dict[str, Shape]) -> Iterator[Weight]:
    for path, shape in adapted.items():
        for part, size in parts_of(lora, path, shape).items():
            trained = not (part == "A" and lora.freeze_lora_a)
            yield Weight(path, part, size, lora.param_init_type, math.prod(size), trained, True)
    for part, size in shared_projection(lora, adapted).items():
        yield Weight("", part, size, lora.param_init_type, math.prod(size), False, True)


def _saved_modules(lora: LoraConfig, parameters: List[str], adapted: Iterable[str]) -> Set[str]:
    """Returns the parameters of the base that modules_to_save trains."""
    found: Set[str] = set()
    for module in lora.modules_to_save or ():
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
        found |= {name for name in hits if not names.is_balance(name)}
    return found


def _settled(run: Run, weights: List[Weight]) -> List[Weight]:
    """Returns the parameters with freeze_include and freeze_exclude carried out, as mindlora.freeze_base does."""
    lora = run.lora
    if lora is None or not run.trains:
        return [dataclasses.replace(weight, trained=False) for weight in weights]
    freeze, train = (_matched(weights, getattr(lora, field), field) for field in ("freeze_include", "freeze_exclude"))
    found = []
    for weight in weights:
        name = weight.parameter
        trained = name in train if (name in freeze) != (name in train) else weight.trained
        found.append(dataclasses.replace(weight, trained=trained))
    if not any(weight.trained for weight in found):
        raise TargetError(
            f"freeze_include {lora.freeze_include!r} freezes everything: nothing is left to train. Narrow it."
        )
    return found


def _matched(weights: List[Weight], patterns: Optional[List[str]], field: str) -> Set[str]:
    """Returns the names of the parameters that any of the patterns matches."""
    parameters, found = [weight.parameter for weight in weights], set()
    for pattern in patterns or ():
        hits = {name for name in parameters if fnmatch.fnmatchcase(name, pattern)}
        if not hits:
            raise TargetError(f"{field} pattern {pattern!r} matches no parameter. Parameters: {listed(parameters)}.")
        found |= hits
    return found


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
