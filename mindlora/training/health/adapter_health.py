"""AdapterHealth: norms, updates and effective ranks of the adapters while they train, and findings about them."""

import dataclasses
import itertools
import math
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np
from mindformers.tools.register import MindFormerConfig
from mindformers.tools.utils import get_real_rank
from mindspore import nn
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.initializers import freezes_b
from mindlora.core.numerics.pair_shapes import EMBEDDING, has_product, layout_of
from mindlora.network.cells.cell import LoRACell
from mindlora.network.quantized.nf4 import first_rows, matrix_shape
from mindlora.network.tensors import to_array
from mindlora.network.tree import lora_cells
from mindlora.run.yaml_run import YamlRun
from mindlora.training.callbacks.common import PeriodicCallback, RuleCallback, register, report_event, step_record
from mindlora.training.health.report import (
    CellHealth,
    HealthReport,
    HealthRules,
    PartHealth,
    event_message,
    summary,
    table,
)
from mindlora.training.log import logger
from mindlora.training.model.network import train_step_of

# Number of rows of W from which |W| is estimated, so that a large base is not read completely.
_SAMPLED_ROWS = 256


@register
class AdapterHealth(RuleCallback, PeriodicCallback):
    """Measures each adapter while it trains, and logs what is wrong and what to change.

    Every ``every_steps`` steps and at the last one, rank 0 puts a HealthReport (mindlora.training.health.report) into
    ``adapter_health`` of MindSpore's callback parameters, logs a line, and reports each new finding of
    mindlora.training.health.report as an event of the run. Norms of gradients are known only if the wrapper has
    record_gradient_norms; mindlora-run sets it. A step's update is known unless data sinking hides single steps.

    Args:
        every_steps (int): Steps between measurements. Default: 10.

    Raises:
        ConfigError: every_steps is out of range, or the network has no adapters.
    """

    def __init__(self, every_steps: int = 10):
        super().__init__("every_steps", every_steps)
        self.rule = HealthRules()
        self.cells: Dict[str, LoRACell] = {}
        self.weight_norms: Dict[str, Optional[float]] = {}
        # The values before the next measured step: path -> part -> array.
        self.kept: Dict[str, Dict[str, np.ndarray]] = {}

    def on_train_begin(self, run_context: RunContext) -> None:
        """Finds the adapters."""
        params = run_context.original_args()
        self.cells = dict(lora_cells(params.train_network))
        if not self.cells:
            raise ConfigError(
                "AdapterHealth: the network has no adapters. Set pet_config in the YAML, or remove AdapterHealth from "
                "callbacks."
            )
        if get_real_rank() == 0 and _recording_step(params) is None:
            logger.warning(
                "AdapterHealth: the train step records no gradient norms, so there are no findings about gradients. "
                "Set runner_wrapper to type: LoraTrainOneStepCell with record_gradient_norms: True."
            )

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Keeps the values before a measured step."""
        params = run_context.original_args()
        # With data sinking, several steps may follow.
        if params.cur_step_num == self.step_before + 1 and self.is_due(params):
            for path, cell in self.cells.items():
                parts = float_parts(cell, trained=True)
                self.kept[path] = {name: part.copy() for name, part in parts.items()}

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Measures the adapters if a measurement is due."""
        params = run_context.original_args()
        params.pop("adapter_health", None)
        if self.is_due(params):
            self._measure(params)
        self.step_before = params.cur_step_num
        self.kept = {}

    def is_due(self, params: InternalCallbackParam) -> bool:
        """Returns whether rank 0 measures at this step."""
        return get_real_rank() == 0 and super().is_due(params)

    def _measure(self, params):
        record = step_record(params)
        step = params.cur_step_num
        recording = _recording_step(params)
        if not self.weight_norms:
            self.weight_norms = {path: weight_norm(cell) for path, cell in self.cells.items()}
        # A skipped step has changed nothing, and its gradients may have overflowed.
        before = {} if record.skipped else self.kept
        norms = {} if record.skipped or recording is None else recording.gradient_norms()
        values = {
            path: cell_values(cell, self.weight_norms[path], before.get(path, {}), norms)
            for path, cell in self.cells.items()
        }
        report, new = self.rule.judge(measure(step, values), record.learning_rate)
        params["adapter_health"] = report
        logger.info("step %d: %s", step, summary(report))
        for _, same in itertools.groupby(new, key=lambda finding: finding.rule):
            report_event(params, "adapter_health", event_message(list(same)))
        if any(finding.path in report.cells for finding in new):
            logger.info("The adapters with new findings:\n%s", table(report, new))


def _recording_step(params: InternalCallbackParam) -> Optional[nn.Cell]:
    """Returns the train step if it records gradient norms, otherwise None."""
    step = train_step_of(params.train_network)
    return step if step is not None and step.records_norms and not step.is_mindformers_step else None


def record_gradient_norms(config: MindFormerConfig) -> None:
    """Makes the train step record the gradient norms that AdapterHealth reports; changes the YAML in place."""
    run = YamlRun(config)
    if run.callbacks_of("AdapterHealth") and run.steps_by_mindlora:
        config.runner_wrapper.setdefault("record_gradient_norms", True)


@dataclasses.dataclass(frozen=True)
class CellValues:
    """The values from which one adapter's health is computed; dicts are keyed by part, and arrays are float32.

    Attributes:
        zero_part (str): The part that is zero until it trains.
        factors (tuple or None): The result of change_factors, or None if there is no such product.
        weight_norm (float or None): |W|.
        before (dict): Values of the trainable parts before the last step.
        gradient_norms (dict): Norms of the gradients in the last step.
    """

    rank: int
    parts: Dict[str, np.ndarray]
    zero_part: str
    factors: Optional[Tuple[np.ndarray, np.ndarray]] = None
    scale: float = 1.0
    weight_norm: Optional[float] = None
    before: Dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    gradient_norms: Dict[str, float] = dataclasses.field(default_factory=dict)


def cell_values(
    cell: LoRACell,
    norm_of_weight: Optional[float],
    before: Mapping[str, np.ndarray],
    gradient_norms: Mapping[str, float],
) -> CellValues:
    """Returns the values measured on a cell.

    ``before`` holds the values of its parts before the last step, and ``gradient_norms`` the norms by parameter name;
    both are empty if unknown.
    """
    parts = float_parts(cell)
    factors = None
    rank = cell.lora_rank
    kept = cell.variant.kept_ranks(parts)
    if kept is not None:
        # Masked directions do not count as rank.
        a, b = cell.variant.low_rank_pair(parts)
        rank = len(kept)
        factors = change_factors(a[kept], b[:, kept]) if rank else None
    elif "A" in parts and has_product(parts["A"], parts["B"]) and not layout_of(parts["A"].shape).stacked:
        factors = change_factors(parts["A"], parts["B"], _initial_pair(cell))
    return CellValues(
        rank=rank,
        parts=parts,
        # Merging sets B to zero, but training an embedding or MiCA starts with A at zero.
        zero_part="A" if cell.layout is EMBEDDING or freezes_b(cell.lora_init) else cell.variant.zero_part,
        factors=factors,
        scale=cell.scale,
        weight_norm=norm_of_weight,
        before=dict(before),
        gradient_norms={name: gradient_norms[p.name] for name, p in cell.parts().items() if p.name in gradient_norms},
    )


def float_parts(cell: LoRACell, trained: bool = False) -> Dict[str, np.ndarray]:
    """Returns all or only the trainable parts as float32 arrays, which may share memory with the parameters."""
    return {
        name: to_float32(to_array(parameter))
        for name, parameter in cell.parts().items()
        if parameter.requires_grad or not trained
    }


def weight_norm(cell: LoRACell) -> Optional[float]:
    """Returns the base's |W|, estimated from at most 256 rows: the first ones of a quantized W, else evenly spread."""
    if cell.quantization:
        rows = first_rows(cell, _SAMPLED_ROWS)
        count = matrix_shape(cell)[0]
    else:
        weight = to_array(cell.weight)
        count = len(weight)
        chosen = np.linspace(0, count - 1, min(_SAMPLED_ROWS, count)).astype(int)
        rows = to_float32(weight[chosen])
        if cell.initial_pair:
            # W is the base before this product was subtracted from it.
            a, b = _initial_pair(cell)
            rows = rows + np.float32(cell.scale) * b[chosen] @ a
    norm = float(np.linalg.norm(rows)) * math.sqrt(count / len(rows))
    return norm if math.isfinite(norm) else None


def _initial_pair(cell):
    pair = cell.initial_pair
    return None if pair is None else (to_float32(pair.a), to_float32(pair.b))


def measure(step: int, cells: Dict[str, CellValues]) -> HealthReport:
    """Returns the health of all cells after a step, by path and without findings."""
    values = _all_singular_values({path: cell.factors for path, cell in cells.items() if cell.factors is not None})
    return HealthReport(step, {path: _cell_health(cell, values.get(path)) for path, cell in cells.items()})


def change_factors(
    a: np.ndarray, b: np.ndarray, initial: Optional[Tuple[np.ndarray, np.ndarray]] = None
) -> Tuple[np.ndarray, np.ndarray]:
    """Returns two matrices, [out, r] and [r, in], whose product is B A, or B A - B0 A0 if ``initial`` is (A0, B0).

    The difference is formed as [B - B0, B] [A0; A - A0], of rank 2 r, in which nothing cancels however little A and B
    moved. A is float32 [r, in] and B [out, r]; for a convolution, they are [r, in, kh, kw] and [out, r, 1, 1].
    """
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    if initial is None:
        return b, a
    a0, b0 = (half.reshape(len(half), -1) for half in initial)
    return np.concatenate([b - b0, b], axis=1), np.concatenate([a0, a - a0])


def effective_rank(singular_values: np.ndarray) -> Optional[float]:
    """Returns exp(-sum p_i log p_i) with p_i the i-th singular value over their sum; None if all are zero.

    Source: Roy and Vetterli, The effective rank: A measure of effective dimensionality, 2007.
    """
    total = singular_values.sum()
    if not total > 0:
        return None
    shares = singular_values[singular_values > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


def singular_values(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the singular values of products, the largest first, from only the Gram matrices of their factors.

    ``left`` and ``right`` are G = L^T L and H = R R^T of each product L R, float64 [cells, r, r]. With roots P and Q
    such that G = P^T P and H = Q^T Q, L R has the singular values of P Q^T: float64 [cells, r]. Values below about 1e-7
    of the largest are lost; the rounding of float32 factors has changed them already.
    """
    # Rows of R of very different sizes (A0 and A - A0) would cost digits: each row is scaled to norm 1, and L
    # inversely.
    norms = np.sqrt(np.einsum("cii->ci", right))
    norms = np.where(norms > 0, norms, 1.0)
    pairs = norms[:, :, None] * norms[:, None, :]
    return np.linalg.svd(_root(left * pairs) @ _root(right / pairs).swapaxes(1, 2), compute_uv=False)


def _root(gram):
    """Returns P with P^T P = ``gram`` for each matrix of a stack."""
    values, vectors = np.linalg.eigh(gram)
    return np.sqrt(np.maximum(values, 0.0))[:, :, None] * vectors.swapaxes(1, 2)


def _all_singular_values(factors):
    """Returns path -> singular values of the product, or None where a factor is not finite."""
    grams: Dict[int, Dict[str, Any]] = {}
    by_path = dict.fromkeys(factors)
    for path, (left, right) in factors.items():
        # One cell at a time, so that its float64 copies stay in the cache.
        left, right = left.astype(np.float64), right.astype(np.float64)
        pair = left.T @ left, right @ right.T
        if all(np.isfinite(gram).all() for gram in pair):
            grams.setdefault(len(right), {})[path] = pair
    for same_rank in grams.values():
        stacks = (np.stack(side) for side in zip(*same_rank.values()))
        by_path.update(zip(same_rank, singular_values(*stacks)))
    return by_path


def _cell_health(cell: CellValues, values: Optional[np.ndarray]) -> CellHealth:
    parts = {
        name: PartHealth(
            size=array.size,
            norm=_norm(array),
            zeros=np.count_nonzero(array == 0) / array.size,
            gradient_norm=cell.gradient_norms.get(name),
            update=_update(array, cell.before.get(name)),
        )
        for name, array in cell.parts.items()
    }
    rank = cell.rank if cell.factors is None else len(cell.factors[1])
    if values is None:
        return CellHealth(rank, cell.zero_part, parts)
    norm = float(abs(cell.scale) * np.linalg.norm(values))
    return CellHealth(
        rank,
        cell.zero_part,
        parts,
        effective_rank=effective_rank(values),
        change_norm=norm,
        change=norm / cell.weight_norm if cell.weight_norm else None,
        singular_values=[float(f"{abs(cell.scale) * value:.4g}") for value in values],
    )


def _update(array, before):
    if before is None:
        return None
    norm = _norm(before)
    return _norm(array - before) / norm if norm else None


def _norm(array) -> float:
    return math.sqrt(np.vdot(array, array))
