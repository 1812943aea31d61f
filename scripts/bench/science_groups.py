"""The claims of bench.py science, one function each: what it trains, and what makes the claim hold."""

import statistics
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from bench.science_data import Task
from bench.science_rates import LOWER, NOT_TOLD_APART, Difference, Sweep, difference
from bench.science_training import Trainings

PASS, FAIL = "pass", "fail"
# As LoRA Without Regret has it for all ranks.
ALPHA = 32
ATTENTION, FEED_FORWARD = ".*wq|.*wk|.*wv|.*wo", ".*w1|.*w2|.*w3"
# Where the searches for the best rate begin.
FULL_RATE, LORA_RATE = 2.0**-8, 2.0**-5


class Setting(NamedTuple):
    """What all groups share."""

    base: str
    plays: Task
    e2e: Task
    length: int
    steps: int
    seeds: Sequence[int]
    moves: int

    def trainings(self, lora: Optional[Dict[str, Any]] = None) -> Trainings:
        """Returns trainings of the base with an adapter, or in full."""
        return Trainings(self.base, self.length, lora)

    def sweep(self, trainings: Trainings, task: Task) -> Sweep:
        """Returns the last held-out losses of trainings on a task."""
        return Sweep(lambda rate, seed: trainings.train(task, rate, seed, self.steps), self.seeds)

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
    losses = sweep.best_losses
    return {
        "side": side,
        **more,
        "best rate": sweep.best,
        "loss": statistics.mean(losses),
        "least": min(losses),
        "greatest": max(losses),
    }


def curves(sweeps: Dict[str, Sweep]) -> Dict[str, Any]:
    """Returns {side: {rate: losses}} for the JSON file."""
    return {side: {f"{rate:g}": losses for rate, losses in sorted(s.losses.items())} for side, s in sweeps.items()}


def verdict_of(found: str, expected: str) -> str:
    """Returns the verdict on a claim that one side is lower, or higher."""
    if found == NOT_TOLD_APART:
        return NOT_TOLD_APART
    return PASS if found == expected else FAIL


def told(found: Difference) -> str:
    """Returns a difference with its interval as text."""
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def rate(setting: Setting) -> Result:
    """The best rates of LoRA and of full fine-tuning, on both tasks."""
    full, lora = setting.trainings(), setting.trainings(adapter(8))
    rows, sweeps, ratios = [], {}, []
    for name, task in (("E2E", setting.e2e), ("plays", setting.plays)):
        sides = {"full": setting.search(full, task, FULL_RATE), "LoRA": setting.search(lora, task)}
        for side, sweep in sides.items():
            optima = [sweep.optimum(seed) for seed in setting.seeds]
            rows.append(row(f"{name}, {side}", sweep, optimum=statistics.median(optima)))
            sweeps[f"{name}, {side}"] = sweep
        ratios += [sides["LoRA"].optimum(seed) / sides["full"].optimum(seed) for seed in setting.seeds]
    enclosed = all(sweep.is_enclosed for sweep in sweeps.values())
    ratio = statistics.median(ratios)
    verdict = (PASS if 5 <= ratio <= 20 else FAIL) if enclosed else NOT_TOLD_APART
    return Result(
        "the best rate of LoRA is about ten times that of full fine-tuning",
        "Schulman et al., LoRA Without Regret, 2025",
        rows,
        verdict,
        f"the ratio of the optima is {ratio:.1f} (median; {min(ratios):.1f} to {max(ratios):.1f}); 5 to 20 passes",
        {"losses": curves(sweeps), "ratios": ratios},
    )


def cells(setting: Setting) -> Result:
    """Attention alone, feed-forward alone and all linear cells, at equal parameters and each at its best rate."""
    sides = {
        "attention, rank 13": adapter(13, target_modules=ATTENTION),
        "feed-forward, rank 8": adapter(8, target_modules=FEED_FORWARD),
        "all linear, rank 5": adapter(5),
    }
    rows, sweeps = [], {}
    for side, lora in sides.items():
        trainings = setting.trainings(lora)
        sweeps[side] = setting.search(trainings, setting.plays)
        rows.append(row(side, sweeps[side], trained=trainings.trained))
    attention, feed_forward, everything = (sweep.best_losses for sweep in sweeps.values())
    gain = difference(everything, attention)
    return Result(
        "all linear cells beat attention alone at equal parameters",
        "Schulman et al., LoRA Without Regret, 2025",
        rows,
        verdict_of(gain.verdict, LOWER),
        f"all linear against attention: {told(gain)}; feed-forward against attention: "
        f"{told(difference(feed_forward, attention))}; all linear against feed-forward: "
        f"{told(difference(everything, feed_forward))}",
        {"losses": curves(sweeps)},
    )


GROUPS: Dict[str, Callable[[Setting], Result]] = {"rate": rate, "cells": cells}
