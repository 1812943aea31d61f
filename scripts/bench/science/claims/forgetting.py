"""What full fine-tuning and LoRA of two ranks learn of the plays, and how far they move from the base."""

import statistics
from typing import Dict, List

from bench.science.claims.claim import FULL_RATE, LORA_RATE, Result, Setting, adapter, all_of, told, verdict_of
from bench.science.rates import HIGHER, LOWER, difference

SIDES = {"full": (None, FULL_RATE), "rank 16": (adapter(16), LORA_RATE), "rank 2": (adapter(2), LORA_RATE)}
# Texts that the base says itself, and their tokens.
TEXTS, TOKENS = 64, 64


def judge(setting: Setting) -> Result:
    """Tries it: forgetting is the divergence KL(base || tuned) on the base's own texts, as the callback has it."""
    rows = []
    learned: Dict[str, List[float]] = {}
    moved: Dict[str, List[float]] = {}
    texts = None
    for side, (lora, guess) in SIDES.items():
        trainings = setting.trainings(lora)
        if texts is None:
            texts = trainings.own_texts(TEXTS, TOKENS)
        trainings.begin({})
        before = trainings.loss(texts)
        best = setting.search(trainings, setting.plays, guess).best
        learned[side], moved[side] = [], []
        for seed in setting.seeds:
            learned[side].append(trainings.train(setting.plays, best, seed, setting.steps).last)
            moved[side].append(trainings.loss(texts) - before)
        means = {"loss": statistics.mean(learned[side]), "KL": statistics.mean(moved[side])}
        rows.append({"side": side, "trained": trainings.trained, "best rate": best, **means})
    less = {side: difference(learned[side], learned["full"]) for side in SIDES}
    kept = {side: difference(moved[side], moved["full"]) for side in SIDES}
    return Result(
        "LoRA learns less and forgets less",
        "Biderman et al., LoRA Learns Less and Forgets Less, 2024",
        rows,
        all_of(verdict_of(less["rank 2"].verdict, HIGHER), verdict_of(kept["rank 2"].verdict, LOWER)),
        "; ".join(
            f"{side} against full: loss {told(less[side])}, KL {told(kept[side])}" for side in ("rank 2", "rank 16")
        ),
        {"losses": learned, "KL": moved},
    )
