"""LoRA on the base in float, in NF4 as the product has it, and rounded to 15 equal steps in the same blocks."""

import statistics

import numpy as np

from bench.science.claims.claim import FAIL, Result, Setting, adapter, summary, told, verdict_of
from bench.science.rates import HIGHER, difference

# As bench.py qlora_loss has it: of the loss in float.
GOAL = 1.03


def judge(setting: Setting) -> Result:
    """Tries it."""
    in_float, in_nf4 = setting.trainings(adapter(8)), setting.trainings(adapter(8, quantize_base="nf4"))
    rounded = {name: uniform(in_float.initial[name]) for name in in_float.base_weights}
    sides = {"float": (in_float, None), "NF4": (in_nf4, None), "uniform": (in_float, rounded)}
    best = setting.search(in_float, setting.plays).best
    rows, losses = [], {}
    for side, (trainings, weights) in sides.items():
        found = [
            trainings.train(setting.plays, best, seed, setting.steps, setting.steps, weights) for seed in setting.seeds
        ]
        losses[side] = [curve.last for curve in found]
        rows.append({"side": side, "rate": best, "before": found[0].losses[0], **summary(losses[side])})
    behind = {side: difference(losses[side], losses["float"]) for side in ("NF4", "uniform")}
    worse = difference(losses["uniform"], losses["NF4"])
    limit = (GOAL - 1) * statistics.mean(losses["float"])
    return Result(
        "NF4 ends where float does, 4-bit uniform does not",
        "Dettmers et al., QLoRA, 2023",
        rows,
        verdict_of(worse.verdict, HIGHER) if behind["NF4"].mean <= limit else FAIL,
        f"NF4 against float: {told(behind['NF4'])} (at most {limit:.4f} passes, {GOAL - 1:.0%} of the loss); uniform "
        f"against float: {told(behind['uniform'])}; uniform against NF4: {told(worse)}",
        {"losses": losses},
    )


def uniform(weight: np.ndarray) -> np.ndarray:
    """Returns a weight rounded to 15 equal steps between plus and minus the absmax of each block of a row."""
    from mindlora.numerics.nf4 import BLOCK

    rounded = np.empty_like(weight)
    for start in range(0, weight.shape[1], BLOCK):
        block = weight[:, start : start + BLOCK]
        step = np.abs(block).max(1, keepdims=True) / 7
        rounded[:, start : start + BLOCK] = np.rint(block / step) * step
    return rounded
