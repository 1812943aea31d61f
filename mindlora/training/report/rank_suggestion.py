"""Rank suggestions: a rank_pattern from the records of AdapterHealth in a run."""

import dataclasses
import math
from collections import Counter
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from mindlora.core.errors import ConfigError, DataError
from mindlora.core.numerics import initializers
from mindlora.models.target_modules import kind_of_path, patterns_of
from mindlora.models.variants.registry import VARIANTS
from mindlora.training.report.history import History

# The ranks to suggest: few, so that many cells share one.
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Largest rank of a cell, in mean ranks: beyond the cell's own rank, the spectrum is a guess.
_MOST = 4
# The assumed decay of singular values after the last known one: its slowest rate, and its rate if only one is known.
_SLOWEST = 0.95
_UNKNOWN = 0.5
# |P| times the norm of its gradient bounds the sum over P g, which is the same for all of these parts.
_PARTS = ("A", "B", *(variant.zero_part for variant in VARIANTS if variant.allocates_ranks))


@dataclasses.dataclass(frozen=True)
class CellEvidence:
    """A run's evidence about one cell.

    Attributes:
        sensitivity (float): Mean over the run of min over its parts P of |P| |gradient of P|: a first-order bound on
            the change of the loss with the size of the adapter's output.
        spectrum (tuple of float): Singular values of the adapter's change of the weight, the largest first.
        used (float): Effective rank of that change, 0 if the change is zero.
    """

    rank: int
    sensitivity: float
    spectrum: Tuple[float, ...]
    used: float

    def scores(self, count: int) -> List[float]:
        """Returns the sensitivity of the first ``count`` directions, shared out by the singular values.

        After the last known one, singular values are assumed to keep falling at their average rate.
        """
        values = [value for value in self.spectrum[: self.rank] if value > 0]
        if not values:
            return [0.0] * count
        fall = (values[-1] / values[0]) ** (1 / (len(values) - 1)) if len(values) > 1 else _UNKNOWN
        fall = min(fall, _SLOWEST)
        total = sum(values)
        while len(values) < count:
            values.append(values[-1] * fall)
        return [self.sensitivity * value / total for value in values[:count]]


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Cells of one kind that get the same rank; ``pattern``, for rank_pattern, matches only these cells."""

    pattern: str
    paths: Tuple[str, ...]
    rank: int
    reason: str


@dataclasses.dataclass(frozen=True)
class RankSuggestion:
    """Ranks for a run like the recorded one; str() is YAML to paste into pet_config.

    Attributes:
        run (str): Folder of the run.
        budget, before, spent (int): The sum of ranks available, in the run, and in the suggestion.
        lora_rank (int): The rank of cells that no pattern matches.
        groups (tuple of RankGroup): All cells, the most sensitive group first.
        without (tuple of str): Cells with too little evidence; they keep their rank, outside the budget.
    """

    run: str
    budget: int
    before: int
    spent: int
    lora_rank: int
    groups: Tuple[RankGroup, ...]
    without: Tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = sum(len(group.paths) for group in self.groups)
        lines = [
            f"# {self.spent} ranks for {cells} cells, within a budget of {self.budget}; {self.run} had {self.before}.",
            "# Paste this into model.model_config.pet_config.",
            f"lora_rank: {self.lora_rank}",
        ]
        patterns = [group for group in self.groups if group.rank != self.lora_rank]
        lines += ["rank_pattern:"] if patterns else ["# No cell needs another rank."]
        for group in self.groups:
            lines.append(f"  # {group.reason}")
            if group in patterns:
                lines.append(f"  '{group.pattern}': {group.rank}")
        if self.without:
            lines.append(f"# Nothing is known of {', '.join(self.without)}, which keep their rank.")
        return "\n".join(lines)


def suggest_ranks(history: History, budget: Optional[int] = None) -> RankSuggestion:
    """Returns the ranks that the gradients and spectra of a run with AdapterHealth suggest.

    A rank is worth the sensitivity of its direction (CellEvidence.scores), AdaLoRA's measure in the singular vectors of
    the learned change. Every cell gets rank 1; then the cell whose next ranks are worth most on average gets them, in
    the steps of LADDER, until the budget is spent. The default budget is the run's sum of ranks.

    Raises:
        DataError: The run recorded no gradients, or no singular values.
        ConfigError: The budget is smaller than the number of cells.
    """
    evidence, without = _evidence(history)
    before = sum(cell.rank for cell in evidence.values())
    budget = before if budget is None else budget
    if budget < len(evidence):
        raise ConfigError(
            f"--budget is {budget}, and each of the {len(evidence)} cells of {history.directory} needs a rank of at "
            "least 1. Give at least that many, or exclude cells in the next run (exclude_modules)."
        )
    ranks = _allocate(evidence, budget)
    usual = Counter(cell.rank for cell in evidence.values()).most_common(1)[0][0]
    return RankSuggestion(
        history.directory,
        budget,
        before,
        sum(ranks.values()),
        max(usual, 1),
        tuple(_groups(evidence, ranks)),
        tuple(without),
    )


def _evidence(history: History) -> Tuple[Dict[str, CellEvidence], List[str]]:
    records = [record["health"]["cells"] for record in history.health]
    if not records:
        raise DataError(
            f"{history.directory} has no measurements of adapters. Add AdapterHealth to callbacks and run it again."
        )
    sensitivities: Dict[str, List[float]] = {}
    for cells in records:
        for path, cell in cells.items():
            sensitivity = _sensitivity(cell)
            if sensitivity is not None:
                sensitivities.setdefault(path, []).append(sensitivity)
    if not sensitivities and not any(map(_has_gradients, records)):
        raise DataError(
            f"{history.directory} has no norms of gradients. Set runner_wrapper.record_gradient_norms: True "
            "(mindlora-run does so) and run it again."
        )
    doubled = _has_initial_pairs(history.runs)
    evidence = {}
    without = []
    for path, cell in records[-1].items():
        # AdaLoRA may have left a cell without ranks, and thus without a spectrum.
        spectrum = [] if cell["rank"] == 0 else cell.get("singular_values")
        if spectrum is None or path not in sensitivities:
            without.append(path)
            continue
        rank = cell["rank"] // 2 if doubled else cell["rank"]
        mean = math.fsum(sensitivities[path]) / len(sensitivities[path])
        # The change includes the initial pair, so more ranks can be in use than the trained rank.
        evidence[path] = CellEvidence(rank, mean, tuple(spectrum), min(cell["effective_rank"] or 0.0, rank))
    if not evidence:
        raise DataError(
            f"{history.directory} has no singular values of what its adapters change: VeRA and convolutions with "
            "groups have none. Take a run of LoRA on linear cells."
        )
    return evidence, without


def _has_gradients(cells: Mapping[str, Any]) -> bool:
    parts = [part for cell in cells.values() for part in cell["parts"].values()]
    return any(part["gradient_norm"] is not None for part in parts)


def _sensitivity(cell: Mapping[str, Any]) -> Optional[float]:
    products = [
        part["norm"] * part["gradient_norm"]
        for name, part in cell["parts"].items()
        if name in _PARTS and part["norm"] is not None and part["gradient_norm"] is not None
    ]
    return min(products) if products else None


def _has_initial_pairs(runs: List[dict]) -> bool:
    """Returns whether a run's lora_init changed the base, so that the change has twice the trained rank."""
    node = (runs[-1]["run"] if runs else {}).get("configuration") or {}
    for key in ("model", "model_config", "pet_config"):
        node = node.get(key) or {}
    return initializers.changes_base(node.get("lora_init")) and not node.get("adapter_path")


def _allocate(evidence: Mapping[str, CellEvidence], budget: int) -> Dict[str, int]:
    most = _MOST * max(budget / len(evidence), 1)
    scores = {path: cell.scores(LADDER[-1]) for path, cell in evidence.items()}
    steps = dict.fromkeys(evidence, 0)
    left = budget - len(evidence)
    while True:
        worth = {}
        for path, step in steps.items():
            now = LADDER[step]
            then = LADDER[min(step + 1, len(LADDER) - 1)]
            if now < then <= most and then - now <= left:
                worth[path] = sum(scores[path][now:then]) / (then - now)
        best = max(worth, key=lambda path: worth[path], default=None)
        if best is None or not worth[best] > 0:
            return {path: LADDER[step] for path, step in steps.items()}
        left -= LADDER[steps[best] + 1] - LADDER[steps[best]]
        steps[best] += 1


def _groups(evidence: Mapping[str, CellEvidence], ranks: Mapping[str, int]) -> Iterable[RankGroup]:
    total = math.fsum(cell.sensitivity for cell in evidence.values()) or 1.0
    patterns = patterns_of(ranks)
    shares = {}
    for pattern, paths in patterns.items():
        shares[pattern] = math.fsum(evidence[path].sensitivity for path in paths) / total
    for pattern, paths in sorted(patterns.items(), key=lambda item: -shares[item[0]]):
        rank = ranks[paths[0]]
        yield RankGroup(pattern, paths, rank, _reason(evidence, paths, rank, shares[pattern]))


def _reason(evidence: Mapping[str, CellEvidence], paths: Sequence[str], rank: int, share: float) -> str:
    cells = [evidence[path] for path in paths]
    before = math.fsum(cell.rank for cell in cells) / len(cells)
    used = math.fsum(cell.used for cell in cells) / len(cells)
    change = "more than" if rank > before else "less than" if rank < before else "as much as"
    kind = kind_of_path(paths[0])
    return (
        f"{kind}, {len(cells)} of {len(evidence)} cells: {share:.0%} of the sensitivity, {used:.1f} of {before:.3g} "
        f"ranks in use, so rank {rank}, {change} before."
    )
