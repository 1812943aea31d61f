"""Reports of AdapterHealth: parts, cells and findings, their text in the log, and the rules that find problems.

Adam divides a gradient by the root of its mean square plus 1e-8, so a step depends on the size of gradients only if
they are near 1e-8. The measure that can be judged without knowing the model is therefore the ratio of a step's update
to the weight: about 1e-3 in a healthy network (Karpathy et al., CS231n, Neural Networks Part 3). LoRA's A begins with
values of size 1 / sqrt(3 in), so that Adam at a usual rate of 1e-4 changes it by 0.5 % to 1 % per step for 1024 to 4096
inputs.
"""

import dataclasses
import math
import re
import statistics
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from mindlora.core.text import columns, examples, number

_TABLE_ROWS = 16
# A part that starts at zero should not be zero after the first steps, even if the rate warms up from 0.
_STEPS_OF_ZERO = 5
# The spectrum of B A says little before B has grown in many directions.
_STEPS_BEFORE_RANK = 50
# Adam's epsilon, compared with the root mean square of a gradient's elements (Kingma and Ba, 2015).
_ADAM_EPSILON = 1e-8
# A gradient explodes if it is ten times its cell's usual gradient and above the usual clipping limit.
_EXPLOSION = 10.0
_CLIPPING = 1.0
_HISTORY = 10
_LEAST_HISTORY = 3
# The lower limit is a tenth of the rule of thumb, 1e-3, because noisy gradients shrink Adam's steps to 0.2 of the rate;
# at the upper limit, 0.2, five steps replace A.
_SLOW_UPDATE = 1e-4
_FAST_UPDATE = 0.2
# A cell is saturated if its update is a hundredth of the typical one.
_SATURATED = 0.01
_UNUSED_RANK = 0.25
_LEAST_UNUSED_RANK = 8
_EXHAUSTED_RANK = 0.9
_ONE_LAYER = 0.8
_LEAST_LAYERS = 3
# A finding about a cell, a layer or (with an empty path) the whole run: path, what is wrong, what to change.
_Fault = Tuple[str, str, str]
_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class PartHealth:
    """One tensor of a cell's adapter: A, B, a magnitude of DoRA or a vector of VeRA.

    Attributes:
        size (int): Number of the part's elements.
        norm (float): Frobenius norm.
        zeros (float): Share of elements that are exactly zero.
        gradient_norm (float or None): Norm of its gradient in the last step, before clipping; None if it is not known.
        update (float or None): |P_t - P_(t-1)| / |P_(t-1)| of the last step; None if the part is frozen, was zero or
            unseen before the step, or if the step was skipped.
    """

    size: int
    norm: float
    zeros: float
    gradient_norm: Optional[float] = None
    update: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class CellHealth:
    """The adapter of one cell.

    D is the adapter's change of the weight: scale B A, or scale (B A - B0 A0) if the initial pair was subtracted from
    the base (PiSSA, OLoRA). The last four attributes are None for VeRA and for grouped convolutions, and the effective
    rank also if D is zero.

    Attributes:
        rank (int): Rank r; 2 r if an initial pair was subtracted, since D can then have that rank.
        zero_part (str): The part that is zero until it trains: usually "B".
        parts (dict): Name of the part -> PartHealth.
        effective_rank (float or None): exp(entropy of the singular values of D over their sum), from 1 to ``rank``.
        change_norm (float or None): |D|.
        change (float or None): |D| / |W|; None also if |W| is not known.
        singular_values (list of float or None): The singular values of D, the largest first, to four digits.
    """

    rank: int
    zero_part: str
    parts: Dict[str, PartHealth]
    effective_rank: Optional[float] = None
    change_norm: Optional[float] = None
    change: Optional[float] = None
    singular_values: Optional[List[float]] = None

    @property
    def gradient_norm(self) -> Optional[float]:
        """The joint gradient norm of all parts, or None if none is known."""
        norms = [part.gradient_norm for part in self.parts.values() if part.gradient_norm is not None]
        return math.hypot(*norms) if norms else None

    @property
    def gradient_size(self) -> int:
        """The number of elements in parts whose gradients are known."""
        return sum(part.size for part in self.parts.values() if part.gradient_norm is not None)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule's finding about one cell, one layer, or (with an empty path) the complete run.

    Attributes:
        rule (str): Name of the rule, as in docs/health.md.
        path (str): Path of the cell or of the layer.
        message (str): What is wrong, with its figures.
        advice (str): What to change.
    """

    rule: str
    path: str
    message: str
    advice: str


@dataclasses.dataclass(frozen=True)
class HealthReport:
    """The health of all adapters after one step.

    Attributes:
        step (int): The step.
        cells (dict): Path of the cell -> CellHealth, in the order of the network.
        findings (list of Finding): One for every rule that holds at this step, including rules that held before.
    """

    step: int
    cells: Dict[str, CellHealth]
    findings: List[Finding] = dataclasses.field(default_factory=list)

    def to_json(self) -> Dict[str, Any]:
        """Returns the report as JSON values; a number that is not finite becomes None."""
        return _json_value(dataclasses.asdict(self))


def summary(report: HealthReport) -> str:
    """Returns a one-line report: medians over the cells, and the number of findings."""
    cells = report.cells.values()
    figures = {
        "change of the weights": [cell.change for cell in cells],
        "effective rank": [cell.effective_rank for cell in cells],
        "update of A": [_of(cell, "A", "update") for cell in cells],
        "update of B": [_of(cell, "B", "update") for cell in cells],
        "gradient": [cell.gradient_norm for cell in cells],
    }
    texts = [f"{len(report.cells)} adapters"]
    for name, values in figures.items():
        numbers = [value for value in values if value is not None]
        if numbers:
            texts.append(f"{name} {statistics.median(numbers):.2g}")
    count = len(report.findings)
    return f"{', '.join(texts)} (medians); {count or 'no'} finding{'' if count == 1 else 's'}"


def event_message(findings: List[Finding]) -> str:
    """Returns new findings of one rule as one message: where, what was found at the first place, and the advice."""
    first = findings[0]
    paths = [finding.path for finding in findings if finding.path]
    where = f" at {examples(paths)}" if paths else ""
    at_first = f"At {first.path}: " if len(paths) > 1 else ""
    return f"{first.rule}{where}. {at_first}{first.message} {first.advice}"


def table(report: HealthReport, findings: List[Finding]) -> str:
    """Returns a table of the cells that ``findings`` name, at most 16 of them, as text."""
    named = dict.fromkeys(finding.path for finding in findings)
    paths = [path for path in named if path in report.cells]
    titles = ("cell", "|A|", "|B|", "gradient", "update A", "update B", "rank", "change")
    rows = []
    for path in paths[:_TABLE_ROWS]:
        cell = report.cells[path]
        norms = [_of(cell, part, "norm") for part in ("A", "B")]
        updates = [_of(cell, part, "update") for part in ("A", "B")]
        figures = [*norms, cell.gradient_norm, *updates]
        used = f"{number(cell.effective_rank)} of {cell.rank}"
        rows.append((path, *("-" if value is None else f"{value:.2g}" for value in figures), used, number(cell.change)))
    more = f"\nand {len(paths) - _TABLE_ROWS} more" if len(paths) > _TABLE_ROWS else ""
    return columns(titles, rows) + more


def _of(cell: CellHealth, part: str, field: str) -> Optional[float]:
    return getattr(cell.parts[part], field) if part in cell.parts else None


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True)
class Situation:
    """A report, and earlier values that the rules need.

    Attributes:
        gradients (dict): Path -> gradient norms of the cell at the last measurements, oldest first.
        rate_settled (bool): Whether the learning rate has stopped rising and is at least half of its highest value, so
            that small updates cannot come from a warm-up or the end of a schedule.
    """

    report: HealthReport
    gradients: Dict[str, List[float]]
    rate_settled: bool


class HealthRules:
    """The rules that judge a run's reports one after another, and find what is new."""

    def __init__(self) -> None:
        self.gradients: Dict[str, List[float]] = {}
        self.rates: List[float] = []
        self.holding: Set[Tuple[str, str]] = set()

    def judge(self, report: HealthReport, learning_rate: Optional[float] = None) -> Tuple[HealthReport, List[Finding]]:
        """Returns the report with all findings, and the findings that are new since the last report.

        ``learning_rate`` is the rate at the report's step, None if unknown.
        """
        situation = Situation(report, self.gradients, self._settled(report.step, learning_rate))
        findings = [Finding(rule.__name__, *fault) for rule in RULES for fault in rule(situation)]
        for path, cell in report.cells.items():
            if cell.gradient_norm is not None and math.isfinite(cell.gradient_norm):
                self.gradients[path] = [*self.gradients.get(path, []), cell.gradient_norm][-_HISTORY:]
        before = self.holding
        self.holding = {(finding.rule, finding.path) for finding in findings}
        new = [finding for finding in findings if (finding.rule, finding.path) not in before]
        return dataclasses.replace(report, findings=findings), new

    def state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs to judge as if it had never stopped, as JSON values."""
        return {"gradients": self.gradients, "rates": self.rates, "holding": sorted(map(list, self.holding))}

    def restore(self, state: Dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        self.gradients = dict(state["gradients"])
        self.rates = list(state["rates"])
        self.holding = {(rule, path) for rule, path in state["holding"]}

    def _settled(self, step, rate) -> bool:
        if rate is None:
            return step >= _STEPS_BEFORE_RANK
        last, highest = self.rates or (math.inf, rate)
        settled = bool(self.rates) and rate <= last * (1 + 1e-6) and rate >= 0.5 * highest
        self.rates = [rate, max(rate, highest)]
        return settled


def not_finite(situation: Situation) -> Iterator[_Fault]:
    """A part of an adapter or its gradient holds NaN or infinity."""
    for path, cell in situation.report.cells.items():
        wrong = [name for name, part in cell.parts.items() if not math.isfinite(part.norm)]
        wrong += [
            f"the gradient of {name}"
            for name, part in cell.parts.items()
            if part.gradient_norm is not None and not math.isfinite(part.gradient_norm)
        ]
        if wrong:
            yield (
                path,
                f"NaN or infinity in {', '.join(wrong)}.",
                "Go back to the last checkpoint and continue with a lower learning rate or with gradient clipping "
                "(use_clip_grad); check that the adapter's param_init_type and compute_dtype are not float16.",
            )


def still_zero(situation: Situation) -> Iterator[_Fault]:
    """A part, usually the one that starts at zero, is still zero, so that the adapter adds nothing."""
    step = situation.report.step
    for path, cell in situation.report.cells.items():
        zero = [name for name, part in cell.parts.items() if part.zeros == 1]
        # AdaLoRA removes all ranks from some cells.
        if step >= _STEPS_OF_ZERO and zero and cell.rank:
            yield (
                path,
                f"{zero[0]} is still zero after {step} steps, so the adapter adds nothing.",
                "Check that the loss depends on this cell, that freeze_include does not name its parameters, that "
                "steps are not skipped for overflow, and that the learning rate is above 0.",
            )


def vanishing_gradient(situation: Situation) -> Iterator[_Fault]:
    """The elements of a cell's gradient are smaller than the epsilon in Adam's denominator."""
    for path, cell in situation.report.cells.items():
        norm = cell.gradient_norm
        if norm is not None and norm / math.sqrt(cell.gradient_size) < _ADAM_EPSILON:
            yield (
                path,
                f"The gradient has a norm of {norm:.1e} over {cell.gradient_size} elements.",
                "Adam no longer makes up for gradients below 1e-8 per element. Check that the loss depends on this "
                "cell and that labels count in it; with a float16 model, raise the loss scale (scale_sense).",
            )


def exploding_gradient(situation: Situation) -> Iterator[_Fault]:
    """A cell's gradient is many times its usual size, and above the usual clipping limit."""
    for path, cell in situation.report.cells.items():
        earlier = situation.gradients.get(path, [])
        norm = cell.gradient_norm
        if norm is None or len(earlier) < _LEAST_HISTORY:
            continue
        usual = statistics.median(earlier)
        if norm > max(_EXPLOSION * usual, _CLIPPING):
            yield (
                path,
                f"The gradient has a norm of {norm:.3g}; {usual:.3g} is usual here.",
                "Set use_clip_grad and max_grad_norm: 1.0 in runner_wrapper, lower the learning rate, and look at the "
                "data of this step.",
            )


def saturated(situation: Situation) -> Iterator[_Fault]:
    """Steps hardly change a cell, although it gets a gradient and other cells move."""
    updates = {path: _largest_update(cell) for path, cell in situation.report.cells.items()}
    sizes = [update for update in updates.values() if update is not None]
    if not sizes or not situation.rate_settled:
        return
    typical = statistics.median(sizes)
    for path, update in updates.items():
        cell = situation.report.cells[path]
        norm = cell.gradient_norm
        if update is None or update >= min(_SATURATED * typical, _SLOW_UPDATE) or norm is None:
            continue
        if norm / math.sqrt(cell.gradient_size) >= _ADAM_EPSILON:
            yield (
                path,
                f"A step changes it by {update:.1e} of its norm ({typical:.1e} is typical), although its gradient has "
                f"a norm of {norm:.1e}.",
                "Its values are too large for the learning rate or too coarse for small steps: set param_init_type: "
                "float32, and check the scale of an adapter that was loaded.",
            )


def rate_too_low(situation: Situation) -> Iterator[_Fault]:
    """A step changes A too little: the learning rate is one for full fine-tuning, or lower."""
    update = _typical_update_of_a(situation)
    if update is not None and update < _SLOW_UPDATE:
        yield (
            "",
            f"A step changes A by {update:.1e} of its norm (median of all cells); about 1e-3 to 1e-2 is usual.",
            "Raise the learning rate: LoRA is mostly trained at 1e-4 to 5e-4, about ten times the rate of full "
            "fine-tuning. If it is that high already, set param_init_type: float32, since bfloat16 and float16 lose "
            "small steps.",
        )


def rate_too_high(situation: Situation) -> Iterator[_Fault]:
    """A step changes A so much that a few steps replace it."""
    update = _typical_update_of_a(situation)
    if update is not None and update > _FAST_UPDATE:
        yield (
            "",
            f"A step changes A by {update:.2g} of its norm (median of all cells); about 1e-3 to 1e-2 is usual.",
            "Lower the learning rate, or lengthen its warm-up.",
        )


def rank_unused(situation: Situation) -> Iterator[_Fault]:
    """The change of a weight has far fewer directions than the adapter allows."""
    for path, rank, used in _used_ranks(situation):
        if rank >= _LEAST_UNUSED_RANK and used < _UNUSED_RANK * rank:
            yield (
                path,
                f"The effective rank is {used:.1f} of {rank}.",
                "A smaller lora_rank (for some cells: rank_pattern) would do as much. If it is meant to be large, set "
                "use_rslora: with the scale alpha / r, large ranks learn slowly.",
            )


def rank_exhausted(situation: Situation) -> Iterator[_Fault]:
    """The change of a weight uses every direction that the adapter allows."""
    for path, rank, used in _used_ranks(situation):
        if rank > 1 and used > _EXHAUSTED_RANK * rank:
            yield (
                path,
                f"The effective rank is {used:.1f} of {rank}.",
                "A larger lora_rank (for some cells: rank_pattern) may lower the loss; compare held_out_loss.",
            )


def one_layer(situation: Situation) -> Iterator[_Fault]:
    """Nearly all of the adapters' change is in one of several layers."""
    squares: Dict[str, float] = {}
    for path, cell in situation.report.cells.items():
        in_layer = _LAYER.match(path)
        if in_layer and cell.change_norm is not None:
            squares[in_layer[0]] = squares.get(in_layer[0], 0.0) + cell.change_norm**2
    total = sum(squares.values())
    if situation.report.step < _STEPS_BEFORE_RANK or len(squares) < _LEAST_LAYERS or not total:
        return
    layer, square = max(squares.items(), key=lambda item: item[1])
    if square > _ONE_LAYER * total:
        yield (
            layer,
            f"{100 * square / total:.0f} % of the squared change of all weights is in this one of {len(squares)} "
            "layers.",
            "Look at the gradients of the other layers, and at alpha_pattern, freeze_include and grouped learning "
            "rates, which may hold them back. A lower learning rate with gradient clipping spreads the change.",
        )


RULES: Tuple[Callable[[Situation], Iterator[_Fault]], ...] = (
    not_finite,
    still_zero,
    vanishing_gradient,
    exploding_gradient,
    saturated,
    rate_too_low,
    rate_too_high,
    rank_unused,
    rank_exhausted,
    one_layer,
)


def _largest_update(cell: CellHealth) -> Optional[float]:
    """Returns the largest update of a cell's parts, or None if none is known."""
    return max((part.update for part in cell.parts.values() if part.update is not None), default=None)


def _typical_update_of_a(situation: Situation) -> Optional[float]:
    """Returns the median update of A over cells whose B starts at zero; None if unknown or if the rate is not settled.

    Only for such cells is the size of the initial values known: an embedding's B starts with values of size 1, other
    cells' B with 0.
    """
    if not situation.rate_settled:
        return None
    cells = (cell for cell in situation.report.cells.values() if cell.zero_part == "B" and "A" in cell.parts)
    updates = [cell.parts["A"].update for cell in cells if cell.parts["A"].update is not None]
    return statistics.median(updates) if updates else None


def _used_ranks(situation: Situation) -> Iterator[Tuple[str, int, float]]:
    """Yields (path, rank, effective rank) of each cell, once enough steps have passed."""
    if situation.report.step >= _STEPS_BEFORE_RANK:
        for path, cell in situation.report.cells.items():
            if cell.effective_rank is not None:
                yield path, cell.rank, cell.effective_rank
