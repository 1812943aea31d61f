"""The loss of each rank at its best rate, where the smallest rank suffices (E2E), and on the plays."""

import statistics
from typing import Dict

from bench.science.claims.claim import FAIL, PASS, Result, Setting, adapter, curves, row
from bench.science.rates import Sweep

RANKS = (1, 4, 16)
# What passes as nearly equal: a share of what is learned.
NEARLY = 0.05


def judge(setting: Setting) -> Result:
    """Tries it."""
    tasks = {"E2E": setting.e2e, "plays": setting.plays}
    sweeps: Dict[str, Dict[str, Sweep]] = {name: {} for name in tasks}
    before: Dict[str, float] = {}
    trained = {}
    for rank in RANKS:
        trainings = setting.trainings(adapter(rank))
        trained[f"rank {rank}"] = trainings.trained
        for name, task in tasks.items():
            sweeps[name][f"rank {rank}"] = setting.search(trainings, task)
            before[name] = trainings.train(task, 0.0, setting.seeds[0], 0).last
    rows, losses, shares = [], {}, {}
    for name, found in sweeps.items():
        for rank, sweep in found.items():
            rows.append(row(f"{name}, {rank}", sweep, trained=trained[rank]))
        losses[name] = curves(found)
        shares[name] = spread(found, before[name])
    return Result(
        "the loss at the best rate is nearly independent of the rank while capacity suffices",
        "Schulman et al., LoRA Without Regret, 2025",
        rows,
        PASS if shares["E2E"] <= NEARLY else FAIL,
        f"from rank {RANKS[0]} to {RANKS[-1]} the losses on E2E differ by {shares['E2E']:.1%} of what is learned "
        f"({NEARLY:.0%} passes); on the plays by {shares['plays']:.1%}",
        {"losses": losses, "shares": shares},
    )


def spread(sweeps: Dict[str, Sweep], before: float) -> float:
    """Returns how far the ranks' losses lie apart, as a share of what the best of them learns."""
    means = [statistics.mean(sweep.best_losses) for sweep in sweeps.values()]
    return (max(means) - min(means)) / (before - min(means))
