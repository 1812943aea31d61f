"""Attention alone, feed-forward alone and all linear cells, at equal parameters and each at its best rate."""

from bench.science.claims.claim import Result, Setting, adapter, curves, row, told, verdict_of
from bench.science.rates import LOWER, difference

ATTENTION, FEED_FORWARD = ".*wq|.*wk|.*wv|.*wo", ".*w1|.*w2|.*w3"
SIDES = {
    "attention, rank 13": adapter(13, target_modules=ATTENTION),
    "feed-forward, rank 8": adapter(8, target_modules=FEED_FORWARD),
    "all linear, rank 5": adapter(5),
}


def judge(setting: Setting) -> Result:
    """Tries it."""
    rows, sweeps = [], {}
    for side, lora in SIDES.items():
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
