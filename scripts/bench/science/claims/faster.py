"""In how many steps PiSSA and LoRA+ reach the loss with which LoRA ends: each at its own best rate, and all at one."""

import statistics
from typing import Any, Dict, List

from bench.science.claims.claim import LORA_RATE, Result, Setting, adapter, all_of, row, summary, told, verdict_of
from bench.science.rates import LOWER, difference, where_reached
from bench.science.training import Curve, Trainings

# The ratio of the rates of B and A, from the paper.
LORA_PLUS = 16
# How often the loss is measured.
POINTS, POINTS_AT_ONE_RATE = 20, 6
# A quarter of the best rate of LoRA at rank 8, as the group "rate" finds it.
ONE_RATE = LORA_RATE / 8
CLAIM = "PiSSA and LoRA+ reach a fixed loss in fewer steps"
SOURCE = "Meng et al., PiSSA, 2024; Hayou et al., LoRA+, 2024"


def judge(setting: Setting) -> Result:
    """Tries it with each side at its best rate."""
    guesses = {"LoRA": LORA_RATE, "PiSSA": LORA_RATE, "LoRA+": LORA_RATE / 8}
    rows, reached, found = [], {}, {}
    for side, trainings in sides(setting).items():
        sweep = setting.search(trainings, setting.plays, guesses[side])
        found[side] = train(setting, trainings, sweep.best, POINTS)
        reached[side] = steps_to_end(found[side], found["LoRA"])
        rows.append(row(side, sweep, **{"steps to LoRA's loss": statistics.mean(reached[side])}))
    verdicts = judged(reached)
    return Result(CLAIM, SOURCE, rows, all_of(*verdicts.values()), "; ".join(verdicts), details(found))


def judge_at_one_rate(setting: Setting) -> Result:
    """Tries it with one low rate: that of A on all sides."""
    rows, reached, found = [], {}, {}
    for side, trainings in sides(setting).items():
        found[side] = train(setting, trainings, ONE_RATE, POINTS_AT_ONE_RATE)
        reached[side] = steps_to_end(found[side], found["LoRA"])
        steps = {"steps to LoRA's loss": statistics.mean(reached[side])}
        rows.append({"side": side, "rate": ONE_RATE, **steps, **summary([curve.last for curve in found[side]])})
    verdicts = judged(reached)
    return Result(CLAIM, SOURCE, rows, all_of(*verdicts.values()), "; ".join(verdicts), details(found))


def sides(setting: Setting) -> Dict[str, Trainings]:
    """Returns what is compared."""
    return {
        "LoRA": setting.trainings(adapter(8)),
        "PiSSA": setting.trainings(adapter(8, lora_init="pissa")),
        "LoRA+": setting.trainings(adapter(8), LORA_PLUS),
    }


def train(setting: Setting, trainings: Trainings, rate: float, points: int) -> List[Curve]:
    """Returns the curve of each seed on the plays, measured so many times."""
    every = max(1, setting.steps // points)
    return [trainings.train(setting.plays, rate, seed, setting.steps, every) for seed in setting.seeds]


def steps_to_end(side: List[Curve], lora: List[Curve]) -> List[float]:
    """Returns for each seed in how many steps a side reaches the last loss of LoRA."""
    return [steps_to(curve, goal.last) for curve, goal in zip(side, lora)]


def steps_to(curve: Curve, goal: float) -> float:
    """Returns after how many steps a curve first reaches a loss.

    A curve that does not reach it counts as one step more than it has.
    """
    steps = where_reached(curve.losses, curve.steps, goal)
    return curve.steps[-1] + 1.0 if steps is None else steps


def judged(reached: Dict[str, List[float]]) -> Dict[str, str]:
    """Returns the verdict on each side, by the text that says it."""
    verdicts = {}
    for side in ("PiSSA", "LoRA+"):
        saving = difference(reached[side], reached["LoRA"])
        verdict = verdict_of(saving.verdict, LOWER)
        verdicts[f"{side} against LoRA: {told(saving)} steps, {verdict}"] = verdict
    return verdicts


def details(found: Dict[str, List[Curve]]) -> Dict[str, Any]:
    """Returns all curves for the JSON file."""
    return {"curves": {side: [curve._asdict() for curve in curves] for side, curves in found.items()}}
