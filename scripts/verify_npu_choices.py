"""mindlora's choices on an NPU, measured by the steps of scripts/verify_npu.py instead of estimated."""

import ctypes
import os
import re
import statistics
from typing import Any, Dict, List, Optional, Sequence

from verify_npu_run import FAILED, HELD, NOT_RUN, ROOT, Outcome
from verify_npu_ways import SHAPES, WIDTH, title

# mindlora/ops/measured.py reads these results from report.json.
_TITLE = re.compile(r"^forward, .* (\d+) tokens$")
ONE_PASS, TWO_STEPS = "lora_linear (ascend)", "lora_delta (ascend)"
# More cores count as faster only if they gain at least this share.
NO_FASTER = 0.03
LIBRARY = os.path.join(ROOT, "mindlora", "ops", "lib", "libmindlora_cpu.so")


def choices(outcomes: Sequence[Outcome], device: str) -> Optional[Dict[str, Any]]:
    """Returns the choices, or None if no operator was compared or timed on an NPU.

    "composed": {operator: why its kernel must not be used}; and the following, None if not measured: "one_pass_tokens":
    the most tokens for which lora_linear is faster than MatMul and lora_delta; "draw_tenths" and "mix_launch": see the
    functions below.
    """
    compared = [outcome for outcome in outcomes if outcome.figures.get("operator") and outcome.state != NOT_RUN]
    timed = {
        outcome.figures["part"]: outcome.figures["microseconds"]
        for outcome in outcomes
        if outcome.state == HELD and "microseconds" in outcome.figures
    }
    if device != "Ascend" or not (compared or timed):
        return None
    wrong: Dict[str, List[str]] = {}
    for outcome in compared:
        if outcome.state == FAILED:
            wrong.setdefault(outcome.figures["operator"], []).append(outcome.figures["dtype"])
    tables = [table for outcome in outcomes if outcome.name == "bench" for table in outcome.figures.get("tables", [])]
    return {
        "composed": {op: f"the kernel does not hold in {', '.join(dtypes)}" for op, dtypes in wrong.items()},
        "one_pass_tokens": one_pass_tokens(tables),
        "draw_tenths": draw_tenths(timed.get("cores", {})),
        "mix_launch": mix_launch(timed.get("kinds", {})),
    }


def one_pass_tokens(tables: Sequence[Dict[str, Any]]) -> Optional[int]:
    """Returns the largest number of tokens up to which lora_linear is faster in every table of bench.py ops."""
    faster: Dict[int, bool] = {}
    for table in tables:
        title, seconds = _TITLE.match(table["title"]), table["seconds"]
        if title and ONE_PASS in seconds:
            tokens = int(title[1])
            first, second = (seconds[side]["wall"]["median"] for side in (ONE_PASS, TWO_STEPS))
            faster[tokens] = faster.get(tokens, True) and first < second
    if not faster:
        return None
    most = 0
    for tokens in sorted(faster):
        if not faster[tokens]:
            break
        most = tokens
    return most


def draw_tenths(microseconds: Dict[str, Any]) -> Optional[int]:
    """Returns the bandwidth that a core draws, in tenths of its even share, or None.

    With the fewest cores that are as fast as more cores, each draws as much as it can. The plans allow at most 3
    shares: a third of the cores.

    Args:
        microseconds (dict): Cores -> shape -> {"median": time}, of the step `ways cores`.
    """
    counts = sorted(int(cores) for cores in microseconds if cores.isdigit())
    if len(counts) < 2:
        return None
    most = counts[-1]
    for cores in counts:
        gains = [gain(microseconds, cores, more) for more in counts if more > cores]
        if 3 * cores >= most and max(gains, default=0) <= NO_FASTER:
            break
    return round(10 * most / cores)


def gain(microseconds: Dict[str, Any], cores: int, more: int) -> float:
    """Returns the share of the time that more cores save, for the shape with the largest saving."""
    few, many = microseconds[str(cores)], microseconds[str(more)]
    return max((1 - many[shape]["median"] / few[shape]["median"] for shape in few if shape in many), default=0.0)


def mix_launch(microseconds: Dict[str, Any]) -> Optional[int]:
    """Returns the extra nanoseconds of a launch of cube and vector cores over one of vector cores, or None.

    It is the median over the shapes of the cube cores' extra time by the profiler, minus their extra time by the plans'
    estimate, which counts no launches. The estimate is in the CPU library, without which no operator ran.

    Args:
        microseconds (dict): Kind of cores -> shape -> {"median": time}, of the step `ways kinds`.
    """
    vector, cube = (microseconds.get(kind, {}) for kind in ("vector", "cube"))
    if not vector or not cube:
        return None
    estimate = ctypes.CDLL(LIBRARY).mindlora_lora_delta_gain_of_cube
    estimate.restype = ctypes.c_int64
    longer = []
    for tokens, rank in SHAPES["kinds"]:
        shape = title(tokens, rank)
        if shape in vector and shape in cube:
            seen = 1000 * (cube[shape]["median"] - vector[shape]["median"])
            sizes = map(ctypes.c_uint64, (tokens, WIDTH, WIDTH, rank))
            longer.append(seen + estimate(*sizes))
    return max(0, round(statistics.median(longer))) if longer else None


def section(chosen: Optional[Dict[str, Any]]) -> List[str]:
    """Returns the page's section on measured choices."""
    if chosen is None:
        return []
    lines = [f"- {op}: MindSpore's own operators, because {why}" for op, why in chosen["composed"].items()]
    if chosen["one_pass_tokens"] is not None:
        lines.append(f"- lora_linear up to {chosen['one_pass_tokens']} tokens, and MatMul with lora_delta beyond")
    if chosen["draw_tenths"] is not None:
        lines.append(f"- a core draws {chosen['draw_tenths'] / 10:g} times its even share of the bandwidth")
    if chosen["mix_launch"] is not None:
        lines.append(
            f"- a launch of cube and vector cores takes {chosen['mix_launch']} ns longer than one of vector cores"
        )
    lines = lines or ["- every kernel that was compared holds, and nothing was timed: as mindlora chooses by itself"]
    advice = "`mindlora doctor --adopt report.json` makes them mindlora's, here or on another machine with such NPUs."
    return ["", "## Measured choices", "", *lines, "", advice]
