"""What full fine-tuning and LoRA learn of the plays, and how far they move from the base.

Forgetting is the divergence KL(base || tuned) on the base's own texts, as the callback has it.
"""

import statistics
from typing import Any, Dict, List, NamedTuple, Tuple

from bench.science.claims.claim import FULL_RATE, LORA_RATE, Result, Setting, adapter, all_of, told, verdict_of
from bench.science.data import Rows
from bench.science.rates import HIGHER, LOWER, difference, where_reached
from bench.science.training import Trainings

SIDES = {"full": (None, FULL_RATE), "rank 16": (adapter(16), LORA_RATE), "rank 2": (adapter(2), LORA_RATE)}
# Texts that the base says itself, and their tokens.
TEXTS, TOKENS = 64, 64
# How often full fine-tuning is measured where its loss is that of LoRA.
POINTS = 12
CLAIM, SOURCE = "LoRA learns less and forgets less", "Biderman et al., LoRA Learns Less and Forgets Less, 2024"


class Course(NamedTuple):
    """The held-out loss of a training, and the divergence from the base, at the same steps."""

    losses: List[float]
    moved: List[float]


def judge(setting: Setting) -> Result:
    """Tries it with each side at its best rate."""
    rows = []
    learned: Dict[str, List[float]] = {}
    moved: Dict[str, List[float]] = {}
    texts = None
    for side, (lora, guess) in SIDES.items():
        trainings = setting.trainings(lora)
        texts = texts or trainings.own_texts(TEXTS, TOKENS)
        best = setting.search(trainings, setting.plays, guess).best
        courses = courses_of(setting, trainings, texts, best, setting.steps)
        learned[side], moved[side] = ends(courses)
        rows.append(row(side, trainings, best, courses))
    less = {side: difference(learned[side], learned["full"]) for side in SIDES}
    kept = {side: difference(moved[side], moved["full"]) for side in SIDES}
    return Result(
        CLAIM,
        SOURCE,
        rows,
        all_of(verdict_of(less["rank 2"].verdict, HIGHER), verdict_of(kept["rank 2"].verdict, LOWER)),
        "; ".join(
            f"{side} against full: loss {told(less[side])}, KL {told(kept[side])}" for side in ("rank 2", "rank 16")
        ),
        {"losses": learned, "KL": moved},
    )


def judge_at_one_rate(setting: Setting) -> Result:
    """Tries it with one rate, the best of full fine-tuning, and where full fine-tuning has LoRA's last loss."""
    trainings = setting.trainings()
    texts = trainings.own_texts(TEXTS, TOKENS)
    full = courses_of(setting, trainings, texts, FULL_RATE, max(1, setting.steps // POINTS))
    rows = [row("full", trainings, FULL_RATE, full)]
    trainings = setting.trainings(adapter(2))
    found = {}
    for rate in (FULL_RATE, LORA_RATE):
        found[rate] = courses_of(setting, trainings, texts, rate, setting.steps)
        rows.append(row("rank 2", trainings, rate, found[rate]))
    kept = difference(ends(found[FULL_RATE])[1], ends(full)[1])
    by_rate = [difference(high, low) for high, low in zip(ends(found[LORA_RATE]), ends(found[FULL_RATE]))]
    equal = {rate: difference(ends(courses)[1], beside(courses, full)) for rate, courses in found.items()}
    return Result(
        CLAIM,
        SOURCE,
        rows,
        verdict_of(kept.verdict, LOWER),
        f"rank 2 against full, both at {FULL_RATE:g}: KL {told(kept)}; where full has the loss with which LoRA ends: "
        + ", ".join(f"KL {told(less)} with LoRA at {rate:g}" for rate, less in equal.items())
        + f"; rank 2 at {LORA_RATE:g} against itself at {FULL_RATE:g}: loss {told(by_rate[0])}, KL {told(by_rate[1])}",
        {"full": full, **{f"rank 2, {rate:g}": courses for rate, courses in found.items()}},
    )


def courses_of(setting: Setting, trainings: Trainings, texts: Rows, rate: float, every: int) -> List[Course]:
    """Trains each seed, and measures every so many steps and at the end."""
    trainings.begin({})
    before = trainings.loss(texts)
    courses = []
    for seed in setting.seeds:
        course = Course([], [])
        for done in trainings.states(setting.plays.train, rate, seed, setting.steps):
            if done == setting.steps or done % every == 0:
                course.losses.append(trainings.loss(setting.plays.held_out))
                course.moved.append(trainings.loss(texts) - before)
        courses.append(course)
    return courses


def ends(courses: List[Course]) -> Tuple[List[float], List[float]]:
    """Returns the last loss and divergence of each seed."""
    return [course.losses[-1] for course in courses], [course.moved[-1] for course in courses]


def beside(lora: List[Course], full: List[Course]) -> List[float]:
    """Returns for each seed how far full fine-tuning has moved where it has the last loss of LoRA."""
    found = []
    for goal, course in zip(ends(lora)[0], full):
        moved = where_reached(course.losses, course.moved, goal)
        found.append(course.moved[-1] if moved is None else moved)
    return found


def row(side: str, trainings: Trainings, rate: float, courses: List[Course]) -> Dict[str, Any]:
    """Returns a line of the table."""
    means = {name: statistics.mean(values) for name, values in zip(("loss", "KL"), ends(courses))}
    return {"side": side, "trained": trainings.trained, "rate": rate, **means}
