"""LoRA and rsLoRA at growing ranks, both at the rate that is best for the smallest, as in the paper."""

from bench.science.claims.claim import LORA_RATE, Result, Setting, adapter, all_of, summary, told, verdict_of
from bench.science.rates import LOWER, difference

RANKS = (4, 16, 64)
ALPHA = 16


def judge(setting: Setting) -> Result:
    """Tries it."""
    rows, losses, gains = [], {}, {}
    for side, use_rslora in (("LoRA", False), ("rsLoRA", True)):
        best = None
        losses[side] = {}
        for rank in RANKS:
            trainings = setting.trainings(adapter(rank, lora_alpha=ALPHA, use_rslora=use_rslora))
            sweep = setting.sweep(trainings, setting.plays)
            if best is None:
                best = sweep.search(LORA_RATE, setting.moves).best
            losses[side][rank] = sweep.at(best)
            rows.append({"side": side, "rank": rank, "rate": best, **summary(losses[side][rank])})
        gains[side] = difference(losses[side][RANKS[-1]], losses[side][RANKS[1]])
    ahead = difference(losses["rsLoRA"][RANKS[-1]], losses["LoRA"][RANKS[-1]])
    return Result(
        "rsLoRA keeps improving at ranks where LoRA stops",
        "Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023",
        rows,
        all_of(verdict_of(gains["rsLoRA"].verdict, LOWER), verdict_of(ahead.verdict, LOWER)),
        f"from rank {RANKS[1]} to {RANKS[-1]} rsLoRA changes by {told(gains['rsLoRA'])}, LoRA by "
        f"{told(gains['LoRA'])}; at rank {RANKS[-1]} rsLoRA against LoRA: {told(ahead)}",
        {"losses": losses},
    )
