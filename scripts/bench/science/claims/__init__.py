"""The claims of bench.py science, a file each: what it trains, and what makes the claim hold.

The groups with "one-rate" in their names try the explanations of claims that did not hold.
"""

from typing import Callable, Dict

from bench.science.claims import best_rate, cells, dora, faster, forgetting, nf4, rank, rslora
from bench.science.claims.claim import Result, Setting

CLAIMS: Dict[str, Callable[[Setting], Result]] = {
    "rate": best_rate.judge,
    "rank": rank.judge,
    "cells": cells.judge,
    "forgetting": forgetting.judge,
    "forgetting-one-rate": forgetting.judge_at_one_rate,
    "rslora": rslora.judge,
    "rslora-one-rate": rslora.judge_at_one_rate,
    "nf4": nf4.judge,
    "faster": faster.judge,
    "faster-one-rate": faster.judge_at_one_rate,
    "dora": dora.judge,
}
