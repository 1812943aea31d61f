"""DoRA against LoRA at two ranks, each at its best rate."""

from bench.science.claims.claim import Result, Setting, adapter, curves, row, told, verdict_of
from bench.science.rates import LOWER, difference

RANKS = (1, 8)


def judge(setting: Setting) -> Result:
    """Tries it."""
    sweeps, gains = {}, {}
    for rank in RANKS:
        for side, use_dora in (("LoRA", False), ("DoRA", True)):
            trainings = setting.trainings(adapter(rank, use_dora=use_dora))
            sweeps[f"{side}, rank {rank}"] = setting.search(trainings, setting.plays)
        gains[rank] = difference(sweeps[f"DoRA, rank {rank}"].best_losses, sweeps[f"LoRA, rank {rank}"].best_losses)
    return Result(
        "DoRA gains on LoRA at low ranks",
        "Liu et al., DoRA, 2024",
        [row(side, sweep) for side, sweep in sweeps.items()],
        verdict_of(gains[RANKS[0]].verdict, LOWER),
        "; ".join(f"rank {rank}: {told(gain)}" for rank, gain in gains.items()),
        {"losses": curves(sweeps)},
    )
