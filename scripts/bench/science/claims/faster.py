"""In how many steps PiSSA and LoRA+ reach the loss with which LoRA ends, each at its own best rate."""

import statistics
from typing import List

from bench.science.claims.claim import LORA_RATE, Result, Setting, adapter, all_of, row, told, verdict_of
from bench.science.rates import LOWER, difference
from bench.science.training import Curve

# Of the rates of B and A, from the paper.
LORA_PLUS = 16
# How often the loss is measured.
POINTS = 20


def judge(setting: Setting) -> Result:
    """Tries it."""
    sides = {
        "LoRA": (setting.trainings(adapter(8)), LORA_RATE),
        "PiSSA": (setting.trainings(adapter(8, lora_init="pissa")), LORA_RATE),
        "LoRA+": (setting.trainings(adapter(8), LORA_PLUS), LORA_RATE / 8),
    }
    every = max(1, setting.steps // POINTS)
    rows, reached, found = [], {}, {}
    for side, (trainings, guess) in sides.items():
        sweep = setting.search(trainings, setting.plays, guess)
        found[side] = [trainings.train(setting.plays, sweep.best, seed, setting.steps, every) for seed in setting.seeds]
        goals = [curve.last for curve in found["LoRA"]]
        reached[side] = [steps_to(curve, goal) for curve, goal in zip(found[side], goals)]
        rows.append(row(side, sweep, **{"steps to LoRA's loss": statistics.mean(reached[side])}))
    savings = {side: difference(reached[side], reached["LoRA"]) for side in ("PiSSA", "LoRA+")}
    verdicts = {side: verdict_of(saving.verdict, LOWER) for side, saving in savings.items()}
    return Result(
        "PiSSA and LoRA+ reach a fixed loss in fewer steps",
        "Meng et al., PiSSA, 2024; Hayou et al., LoRA+, 2024",
        rows,
        all_of(*verdicts.values()),
        "; ".join(f"{side} against LoRA: {told(savings[side])} steps, {verdict}" for side, verdict in verdicts.items()),
        {"curves": {side: [curve._asdict() for curve in curves] for side, curves in found.items()}},
    )


def steps_to(curve: Curve, goal: float) -> float:
    """Returns after how many steps a curve first reaches a loss, between two measurements by a line.

    A curve that does not reach it counts as one step more than it has.
    """
    points: List[tuple] = list(zip(curve.steps, curve.losses))
    for (step, loss), (next_step, next_loss) in zip(points, points[1:]):
        if next_loss <= goal:
            return step + (next_step - step) * (loss - goal) / (loss - next_loss)
    return curve.steps[-1] + 1.0
