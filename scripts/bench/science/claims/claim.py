"""What all claims share: the setting of their trainings, the form of their results."""

import statistics
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from bench.science.data import Task
from bench.science.rates import NOT_TOLD_APART, Difference, Sweep
from bench.science.training import Trainings

PASS, FAIL = "pass", "fail"
# As LoRA Without Regret has it for all ranks.
ALPHA = 32
# Where the searches for the best rate begin.
FULL_RATE, LORA_RATE = 2.0**-10, 2.0**-8


class Setting(NamedTuple):
    """What all groups share."""

    base: str
    plays: Task
    e2e: Task
    length: int
    steps: int
    seeds: Sequence[int]
    moves: int

    def trainings(self, lora: Optional[Dict[str, Any]] = None, ratio: float = 1) -> Trainings:
        """Returns trainings of the base with an adapter, or in full."""
        return Trainings(self.base, self.length, lora, ratio)

    def sweep(self, trainings: Trainings, task: Task) -> Sweep:
        """Returns the last held-out losses of trainings on a task."""
        return Sweep(lambda rate, seed: trainings.train(task, rate, seed, self.steps).last, self.seeds)

    def search(self, trainings: Trainings, task: Task, rate: float = LORA_RATE) -> Sweep:
        """Returns them at the best rate and beside it."""
        return self.sweep(trainings, task).search(rate, self.moves)


class Result(NamedTuple):
    """A claim, what was measured, and whether the claim held: PASS, FAIL or NOT_TOLD_APART, with the reason."""

    claim: str
    source: str
    rows: List[Dict[str, Any]]
    verdict: str
    reason: str
    details: Dict[str, Any]


def adapter(rank: int, **fields: Any) -> Dict[str, Any]:
    """Returns the fields of a LoraConfig."""
    return {"target_modules": "all-linear", "lora_rank": rank, "lora_alpha": ALPHA, **fields}


def row(side: str, sweep: Sweep, **more: Any) -> Dict[str, Any]:
    """Returns a line of a table: a side at its best rate."""
    return {"side": side, **more, "best rate": sweep.best, **summary(sweep.best_losses)}


def summary(losses: Sequence[float]) -> Dict[str, float]:
    """Returns mean, least and greatest of the seeds' losses."""
    return {"loss": statistics.mean(losses), "least": min(losses), "greatest": max(losses)}


def curves(sweeps: Dict[str, Sweep]) -> Dict[str, Any]:
    """Returns {side: {rate: losses}} for the JSON file."""
    return {side: {f"{rate:g}": losses for rate, losses in sorted(s.losses.items())} for side, s in sweeps.items()}


def verdict_of(found: str, expected: str) -> str:
    """Returns the verdict on a claim that one side is lower, or higher."""
    if found == NOT_TOLD_APART:
        return NOT_TOLD_APART
    return PASS if found == expected else FAIL


def all_of(*verdicts: str) -> str:
    """Returns the verdict on a claim of several parts: that on its weakest."""
    return next(verdict for verdict in (FAIL, NOT_TOLD_APART, PASS) if verdict in verdicts)


def told(found: Difference) -> str:
    """Returns a difference with its interval as text."""
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"
