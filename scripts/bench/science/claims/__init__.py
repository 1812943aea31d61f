"""The claims of bench.py science, a file each: what it trains, and what makes the claim hold."""

from typing import Callable, Dict

from bench.science.claims import best_rate, cells, dora, faster, forgetting, nf4, rank, rslora
from bench.science.claims.claim import Result, Setting

CLAIMS: Dict[str, Callable[[Setting], Result]] = {
    "rate": best_rate.judge,
    "rank": rank.judge,
    "cells": cells.judge,
    "forgetting": forgetting.judge,
    "rslora": rslora.judge,
    "nf4": nf4.judge,
    "faster": faster.judge,
    "dora": dora.judge,
}
