"""LoRA and rsLoRA at growing ranks: both at the rate that is best for the smallest, and both at one low rate."""

from typing import Optional, Sequence

from bench.science.claims.claim import LORA_RATE, Result, Setting, adapter, all_of, summary, told, verdict_of
from bench.science.rates import LOWER, difference

RANKS = (4, 16, 64)
ALPHA = 16
# The paper has one rate for both and for all ranks. This one is far below the best.
LOW_RATE, LOW_RANKS = LORA_RATE / 8, (4, 64)


def judge(setting: Setting) -> Result:
    """Tries it at the rate that is best for the smallest rank, which each side searches for."""
    return compare(setting, RANKS)


def judge_at_one_rate(setting: Setting) -> Result:
    """Tries it at one low rate: Adam's first steps change a weight alike at each rank if the scale is alpha / r."""
    return compare(setting, LOW_RANKS, LOW_RATE)


def compare(setting: Setting, ranks: Sequence[int], rate: Optional[float] = None) -> Result:
    """Returns what the last two of the ranks differ by on each side; without a rate, the first rank's best is taken."""
    rows, losses, gains = [], {}, {}
    for side, use_rslora in (("LoRA", False), ("rsLoRA", True)):
        chosen = rate
        losses[side] = {}
        for rank in ranks:
            trainings = setting.trainings(adapter(rank, lora_alpha=ALPHA, use_rslora=use_rslora))
            sweep = setting.sweep(trainings, setting.plays)
            if chosen is None:
                chosen = sweep.search(LORA_RATE, setting.moves).best
            losses[side][rank] = sweep.at(chosen)
            rows.append({"side": side, "rank": rank, "rate": chosen, **summary(losses[side][rank])})
        gains[side] = difference(losses[side][ranks[-1]], losses[side][ranks[-2]])
    ahead = difference(losses["rsLoRA"][ranks[-1]], losses["LoRA"][ranks[-1]])
    return Result(
        "rsLoRA keeps improving at ranks where LoRA stops",
        "Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023",
        rows,
        all_of(verdict_of(gains["rsLoRA"].verdict, LOWER), verdict_of(ahead.verdict, LOWER)),
        f"from rank {ranks[-2]} to {ranks[-1]} rsLoRA changes by {told(gains['rsLoRA'])}, LoRA by "
        f"{told(gains['LoRA'])}; at rank {ranks[-1]} rsLoRA against LoRA: {told(ahead)}",
        {"losses": losses},
    )
