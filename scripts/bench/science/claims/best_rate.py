"""The best rates of LoRA and of full fine-tuning, on both tasks, and with a smaller alpha."""

import statistics
from typing import Dict, List

from bench.science.claims.claim import ALPHA, FAIL, FULL_RATE, LORA_RATE, PASS, Result, Setting, adapter, curves, row
from bench.science.rates import NOT_TOLD_APART, Sweep

LEAST, GREATEST = 5, 20
# The rate compensates for it, as far as only B counts.
SMALL_ALPHA = ALPHA // 8


def judge(setting: Setting) -> Result:
    """Tries it."""
    full, lora = setting.trainings(), setting.trainings(adapter(8))
    sweeps: Dict[str, Sweep] = {}
    ratios: List[float] = []
    for name, task in (("E2E", setting.e2e), ("plays", setting.plays)):
        sweeps[f"{name}, full"] = setting.search(full, task, FULL_RATE)
        sweeps[f"{name}, LoRA"] = setting.search(lora, task)
        ratios += quotients(setting, sweeps[f"{name}, LoRA"], sweeps[f"{name}, full"])
    small = setting.trainings(adapter(8, lora_alpha=SMALL_ALPHA))
    side = f"E2E, LoRA, alpha {SMALL_ALPHA}"
    sweeps[side] = setting.search(small, setting.e2e, LORA_RATE * 2)
    small_ratio = statistics.median(quotients(setting, sweeps[side], sweeps["E2E, full"]))
    ratio = statistics.median(ratios)
    if all(sweep.is_enclosed for sweep in sweeps.values()):
        verdict = PASS if LEAST <= ratio <= GREATEST else FAIL
    else:
        verdict = NOT_TOLD_APART
    return Result(
        "the best rate of LoRA is about ten times that of full fine-tuning",
        "Schulman et al., LoRA Without Regret, 2025",
        [row(side, sweep, optimum=statistics.median(optima(setting, sweep))) for side, sweep in sweeps.items()],
        verdict,
        f"the ratio of the optima is {ratio:.1f} (median; {min(ratios):.1f} to {max(ratios):.1f}); {LEAST} to "
        f"{GREATEST} passes; with alpha {SMALL_ALPHA} in place of {ALPHA} it is {small_ratio:.1f} on E2E",
        {"losses": curves(sweeps), "ratios": ratios},
    )


def optima(setting: Setting, sweep: Sweep) -> List[float]:
    """Returns the best rate of each seed."""
    return [sweep.optimum(seed) for seed in setting.seeds]


def quotients(setting: Setting, lora: Sweep, full: Sweep) -> List[float]:
    """Returns the ratio of the best rates for each seed."""
    return [high / low for high, low in zip(optima(setting, lora), optima(setting, full))]
